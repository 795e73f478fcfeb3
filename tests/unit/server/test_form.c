/* JOIN and ATTACH: how a job comes together at its home, and every way in which it does not. */
#include "double.h"
#include "proto/cluster.pb-c.h"
#include "proto/pack.h"
#include "server/job/job.h"

#define FAR _cleanup_(far_freep) struct far *far

static const uint32_t two_each[] = { 2, 2, 2, 2 };

/* Whether JOINs wait, as if there were others before them. */
static bool waits;

void __real_form_join(struct server *server, struct delivery *delivery);
void __wrap_form_join(struct server *server, struct delivery *delivery);

void __wrap_form_join(struct server *server, struct delivery *delivery)
{
	if (waits && list_empty(&server->joins))
		form_join_later(server, delivery);
	else
		__real_form_join(server, delivery);
}

/* Joins the only node of a job. */
static struct asked *join_alone(struct far *far, unsigned end, unsigned number)
{
	struct layout layout;
	char name[16];

	(void)snprintf(name, sizeof(name), "job%u", number);
	layout = far_layout(name, 1, NULL);
	return far_join(far, end, &layout, 0, NULL);
}

#define MAX_JOBS 8

TEST(joins_that_wait_take_turns)
{
	FAR = far_new(&(struct far_options){ .max_jobs = MAX_JOBS });
	struct asked *many[2 * MAX_JOBS + 1], *one;

	waits = true;
	for (unsigned i = 0; i < ARRAY_SIZE(many); i++)
		many[i] = join_alone(far, 0, i);
	one = join_alone(far, 1, 100);
	waits = false;
	far_expect(far, one, 0, NULL);
	for (unsigned i = 0; i < ARRAY_SIZE(many); i++)
		far_expect(far, many[i], i < MAX_JOBS - 1 ? 0 : -EDQUOT, NULL);
}

TEST(joins_that_wait_end_with_their_peer)
{
	FAR = far_new(&(struct far_options){ .max_jobs = MAX_JOBS });
	struct asked *lost[3], *other;

	waits = true;
	for (unsigned i = 0; i < ARRAY_SIZE(lost); i++)
		lost[i] = join_alone(far, 0, i);
	other = join_alone(far, 1, 100);
	waits = false;
	far_lose(far, 0);
	for (unsigned i = 0; i < ARRAY_SIZE(lost); i++)
		far_expect(far, lost[i], -ECONNRESET, NULL);
	far_expect(far, other, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
}

TEST(all_nodes_join_and_attach)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 4, two_each);
	struct server_job_info *jobs;
	size_t n;

	far_form(far, &layout);
	ASSERT_TRUE(layout.job != 0);
	ASSERT_EQ(layout.joined_part_bytes, 65536);
	ASSERT_EQ(layout.n_stripes, PLACEMENT_STRIPES);
	ASSERT_OK(server_jobs(far->server, &jobs, &n));
	ASSERT_EQ(n, 1);
	ASSERT_STR(jobs[0].name, "job");
	ASSERT_STR(jobs[0].state, "running");
	ASSERT_TRUE(jobs[0].number == layout.job);
	ASSERT_EQ(jobs[0].size, 8);
	ASSERT_EQ(jobs[0].n_nodes, 4);
	free(jobs);
}

/* Each node joins again whenever one more rank has come; the answer goes to its newest call. */
TEST(nodes_join_rank_by_rank)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	const uint32_t first[] = { 0 }, third[] = { 2 };
	struct asked *a0 =
		far_join(far, 0, &layout, 0,
			 &(struct join_change){ .ranks = first, .n_ranks = 1, .local_size = 2 });
	struct asked *b0 =
		far_join(far, 1, &layout, 1,
			 &(struct join_change){ .ranks = third, .n_ranks = 1, .local_size = 2 });
	struct asked *a1 = far_join(far, 0, &layout, 0, NULL), *b1, *stale;

	far_expect(far, a0, -EALREADY, "newer join");
	far_expect_waiting(far, b0);
	far_expect_waiting(far, a1);
	/* One that was overtaken on its way changes nothing. */
	stale = far_join(far, 0, &layout, 0,
			 &(struct join_change){ .ranks = first, .n_ranks = 1, .local_size = 2 });
	far_expect(far, stale, -EALREADY, "newer join");
	far_expect_waiting(far, a1);
	b1 = far_join(far, 1, &layout, 1, NULL);
	far_expect(far, b0, -EALREADY, NULL);
	far_expect(far, a1, 0, NULL);
	far_expect(far, b1, 0, NULL);
	/* Nor does it when all is complete. */
	far_expect(far, far_join(far, 1, &layout, 1, NULL), -EALREADY, "complete");
	ASSERT_EQ(far_n_jobs(far), 1);
}

TEST(part_size_is_a_power_of_two)
{
	static const uint32_t asked[] = { 4096, 5000, 8192, 100000, PART_BYTES_MAX };
	static const uint32_t given[] = { 4096, 4096, 8192, 65536, PART_BYTES_MAX };
	FAR = far_new(NULL);

	for (size_t i = 0; i < ARRAY_SIZE(asked); i++) {
		char name[8];
		struct layout layout;

		(void)snprintf(name, sizeof(name), "job%zu", i);
		layout = far_layout(name, 1, NULL);
		layout.part_bytes = asked[i];
		far_form(far, &layout);
		ASSERT_EQ(layout.joined_part_bytes, given[i]);
	}
}

/* What one sum reads, of a node's ranks or of all nodes, is bounded. */
TEST(parts_of_many_are_smaller)
{
	static const uint32_t on_one[] = { 2, 3, 8 }, given[] = { 64 << 20, 32 << 20, 16 << 20 };
	FAR = far_new(NULL);
	struct layout layout;
	char name[8];

	for (size_t i = 0; i < ARRAY_SIZE(on_one); i++) {
		(void)snprintf(name, sizeof(name), "job%zu", i);
		layout = far_layout(name, 2, (uint32_t[]){ 1, on_one[i] });
		layout.part_bytes = PART_BYTES_MAX;
		far_form(far, &layout);
		ASSERT_EQ(layout.joined_part_bytes, given[i]);
	}
	layout = far_layout("nodes", 4, NULL);
	layout.part_bytes = PART_BYTES_MAX;
	far_form(far, &layout);
	ASSERT_EQ(layout.joined_part_bytes, 32 << 20);
}

TEST(part_size_goes_by_the_link)
{
	static const uint32_t mbps[] = { 0, 10, 500, 1000, 2500, 100000 };
	static const uint32_t given[] = { 128 << 10, 16 << 10,	32 << 10,
					  64 << 10,  128 << 10, 512 << 10 };

	for (size_t i = 0; i < ARRAY_SIZE(mbps); i++) {
		struct far_options options = { .by_link = true, .mbps = mbps[i] };
		FAR = far_new(&options);
		struct layout layout = far_layout("job", 1, NULL);

		far_form(far, &layout);
		ASSERT_EQ(layout.joined_part_bytes, given[i]);
		/* Who asks gets what was asked for. */
		layout = far_layout("other", 1, NULL);
		layout.part_bytes = 8192;
		far_form(far, &layout);
		ASSERT_EQ(layout.joined_part_bytes, 8192);
	}
}

TEST(request_timeout_is_the_least)
{
	FAR = far_new(NULL);
	struct layout a = far_layout("job", 2, NULL), b = a;
	struct asked *first, *second;
	_cleanup_(unpack_freep) Bps__Cluster__JobJoined *m = NULL;

	b.request_timeout_ms = 5000;
	first = far_join(far, 0, &a, 0, NULL);
	second = far_join(far, 1, &b, 1, NULL);
	far_expect(far, second, 0, NULL);
	far_expect(far, first, 0, NULL);
	ASSERT_OK(unpack(&bps__cluster__job_joined__descriptor, first->data, first->answer.len,
			 (ProtobufCMessage **)&m));
	ASSERT_EQ(m->request_timeout_ms, 5000);
}

/* Both sides are named, to both sides; the next try is not burdened. */
static void expect_disagreement(struct join_change change, const char *text)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	struct asked *first = far_join(far, 0, &layout, 0, NULL);
	struct asked *second = far_join(far, 1, &layout, 1, &change);

	far_expect(far, second, -EINVAL, text);
	far_expect(far, first, -EINVAL, text);
	ASSERT_EQ(far_n_jobs(far), 0);
	far_form(far, &layout);
}

TEST(mismatches_name_both_sides)
{
	static const uint32_t taken[] = { 1, 3 };

	expect_disagreement((struct join_change){ .size = 8 },
			    "rank 2 (node 1) says size 8, rank 0 (node 0) says size 4");
	expect_disagreement((struct join_change){ .n_nodes = 3 },
			    "rank 2 (node 1) says number of nodes 3, rank 0 (node 0) says number "
			    "of nodes 2");
	expect_disagreement(
		(struct join_change){ .part_bytes = 8192 },
		"rank 2 (node 1) says part size 8192, rank 0 (node 0) says part size 0");
	expect_disagreement((struct join_change){ .epoch = 4 },
			    "rank 2 (node 1) says view 4, rank 0 (node 0) says view 3");
	expect_disagreement((struct join_change){ .view_digest = 1 },
			    "rank 2 (node 1) and rank 0 (node 0) have different lists of servers");
	expect_disagreement((struct join_change){ .ranks = taken, .n_ranks = 2 },
			    "there is a rank 1 on node 0 (end0) and another on node 1 (end1)");
	expect_disagreement((struct join_change){ .local_size = 3 },
			    "local sizes of 2 of 2 nodes add up to 5, but size is 4");
	expect_disagreement(
		(struct join_change){ .ranks = taken + 1, .n_ranks = 1, .local_size = 1 },
		"local sizes of 2 of 2 nodes add up to 3, but size is 4");
}

TEST(first_join_must_fit_the_home)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct join_change old = { .epoch = 2 }, other = { .view_digest = 5 };

	far_expect(far, far_join(far, 0, &layout, 0, &old), -ESTALE, "does not know view 2");
	far_expect(far, far_join(far, 0, &layout, 0, &other), -EINVAL,
		   "rank 0 (node 0) has another list of servers");
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* Two machines with one node number are told apart from one whose daemon has restarted. */
TEST(two_machines_with_one_number)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	static const uint32_t others[] = { 4, 5 };
	struct asked *a = far_join(far, 1, &layout, 1, NULL);
	struct asked *b =
		far_join(far, 2, &layout, 1,
			 &(struct join_change){ .ranks = others, .n_ranks = 2, .instance = 7 });

	far_expect(far, a, -EINVAL, "ranks 2, 3 on end1 and ranks 4, 5 on end2 both say node 1");
	far_expect(far, b, -EINVAL, "both say node 1");
}

TEST(restarted_daemon_takes_its_place)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, NULL);
	struct asked *a = far_join(far, 0, &layout, 0, NULL);
	struct asked *b = far_join(far, 1, &layout, 1, NULL), *again, *c;

	/* The new daemon comes before the old one is known to be lost. */
	again = far_join(far, 5, &layout, 1, &(struct join_change){ .instance = 77 });
	far_expect(far, b, -EALREADY, NULL);
	far_lose(far, 1);
	far_expect_waiting(far, again);
	c = far_join(far, 2, &layout, 2, NULL);
	far_expect(far, a, 0, NULL);
	far_expect(far, again, 0, NULL);
	far_expect(far, c, 0, NULL);
}

TEST(another_secret_of_the_same_user_is_another_job)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct join_change wrong = { .secret = "x", .instance = 99 };
	struct layout soon = layout;
	struct asked *first, *a, *b;

	/* Who is first keeps nobody out, */
	soon.timeout_ms = 300;
	first = far_join(far, 3, &soon, 0, &wrong);
	a = far_join(far, 0, &layout, 0, NULL);
	far_expect_waiting(far, a);
	b = far_join(far, 1, &layout, 1, NULL);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	/* completes and ends nothing, and hears at last what may be wrong. */
	far_expect(far, first, -ETIMEDOUT, "this user has a job of that name with another secret");
	ASSERT_EQ(far->failed[0].n, 0);
	ASSERT_EQ(far_n_jobs(far), 1);
}

TEST(another_users_job_of_that_name_is_another)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct join_change other = { .secret = "x", .instance = 99, .user = 2000 };
	struct asked *a = far_join(far, 0, &layout, 0, NULL);
	struct asked *c = far_join(far, 3, &layout, 1, &other);

	/* Nothing is said of the one that is there, and neither completes the other. */
	far_expect_waiting(far, c);
	ASSERT_EQ(far_n_jobs(far), 2);
	far_expect(far, far_join(far, 1, &layout, 1, NULL), 0, NULL);
	far_expect(far, a, 0, NULL);
	far_expect_waiting(far, c);
	far_expect(far, far_join(far, 2, &layout, 0, &other), 0, NULL);
	far_expect(far, c, 0, NULL);
	ASSERT_EQ(far->failed[0].n, 0);
}

TEST(deadline_names_the_missing)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	static const uint32_t half[] = { 2 };
	struct asked *a, *b;

	layout.timeout_ms = 50;
	a = far_join(far, 0, &layout, 0, NULL);
	b = far_join(far, 1, &layout, 1,
		     &(struct join_change){ .ranks = half, .n_ranks = 1, .local_size = 2 });
	far_expect(far, a, -ETIMEDOUT,
		   "job job: ranks 3-5 have not joined within 0.05 s (3 of 6 ranks are here)");
	far_expect(far, b, -ETIMEDOUT, "ranks 3-5 have not joined");
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* A rank may begin the next run while another of its node has not left this one. */
TEST(the_next_run_begins_when_all_have_left)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 1, two_each);
	static const uint32_t first[] = { 0 };
	struct asked *early;

	layout.resume = true;
	far_form(far, &layout);
	early = far_join(far, 0, &layout, 0,
			 &(struct join_change){
				 .ranks = first, .n_ranks = 1, .local_size = 2, .instance = 7 });
	far_expect_waiting(far, early);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	far_expect_waiting(far, early);
	while (!far_n_jobs(far))
		ASSERT_OK(loop_turn(far->loop, 0));
	far_expect(far, far_join(far, 0, &layout, 0, &(struct join_change){ .instance = 7 }), 0,
		   NULL);
	far_expect(far, early, -EALREADY, "newer join");
}

TEST(seconds_for_people)
{
	static const uint64_t ms[] = { 1, 250, 1500, 9999, 59998, 60000, 600000, TIMEOUT_MAX_MS };
	static const char *const texts[] = { "0.001", "0.25", "1.5", "10",
					     "60",    "60",   "600", "31536000" };

	for (size_t i = 0; i < ARRAY_SIZE(ms); i++) {
		struct seconds_text text;

		ASSERT_STR(job_seconds_text(ms[i], &text), texts[i]);
	}
}

/* The deadline is that of the first call: joining again does not put it off. */
TEST(deadline_counts_from_the_first)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a;

	layout.timeout_ms = 100;
	a = far_join(far, 0, &layout, 0, NULL);
	layout.timeout_ms = 1000000;
	while (!a->done) {
		struct asked *again = far_join(far, 0, &layout, 0, NULL);

		far_expect(far, a, -EALREADY, NULL);
		a = again;
		ASSERT_OK(loop_turn(far->loop, 20));
	}
	ASSERT_EQ(a->status, -ETIMEDOUT);
	ASSERT_CONTAINS(a->text, "rank 1 has not joined within 0.1 s (1 of 2 ranks are here)");
}

TEST(lost_daemon_leaves_the_others_waiting)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct asked *a = far_join(far, 0, &layout, 0, NULL);
	struct asked *b = far_join(far, 1, &layout, 1,
				   &(struct join_change){ .local_size = 1, .no_ranks = true });

	far_expect(far, b, -ECANCELED, NULL);
	far_expect_waiting(far, a);
	ASSERT_EQ(far_n_jobs(far), 1);
	far_lose(far, 0);
	far_expect(far, a, -ECANCELED, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(node_takes_its_join_back)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);
	struct join_change none = { .no_ranks = true };
	struct asked *a = far_join(far, 0, &layout, 0, NULL), *b;

	/* Nobody else can do it in its place. */
	far_expect(far, far_join(far, 4, &layout, 0, &none), -ECANCELED, "takes no part");
	far_expect_waiting(far, a);
	far_expect(far, far_join(far, 0, &layout, 0, &none), -ECANCELED, "takes no part");
	far_expect(far, a, -ECANCELED, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
	/* Nor does it begin one. */
	far_expect(far, far_join(far, 0, &layout, 0, &none), -ECANCELED, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
	a = far_join(far, 0, &layout, 0, NULL);
	b = far_join(far, 1, &layout, 1, NULL);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	far_expect(far,
		   far_join(far, 5, &layout, 0,
			    &(struct join_change){ .no_ranks = true, .instance = 5 }),
		   -ECANCELED, "was not in it");
	ASSERT_EQ(far_n_jobs(far), 1);
}

/* Alone, a node may begin again with another idea of the job. */
TEST(only_node_may_change_its_mind)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL), other = far_layout("job", 3, NULL);
	struct asked *a = far_join(far, 0, &layout, 0, NULL);
	struct asked *b = far_join(far, 0, &other, 0, &(struct join_change){ .instance = 7 });

	far_expect(far, a, -EALREADY, "newer join");
	far_expect_waiting(far, b);
	ASSERT_EQ(far_n_jobs(far), 1);
}

TEST(new_instance_ends_the_old_run)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	struct join_change anew = { .instance = 5000 };
	struct asked *pending, *a, *b;
	uint64_t old;

	far_form(far, &layout);
	pending = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 4, 0);
	b = far_join(far, 1, &layout, 1, &anew);
	far_expect(far, pending, -ECONNRESET, "node 1 has started it anew with ranks 2, 3");
	ASSERT_EQ(far->failed[0].n, 1);
	ASSERT_EQ(far->failed[0].status, -ECONNRESET);
	ASSERT_TRUE(far->failed[0].job == layout.job);
	ASSERT_CONTAINS(far->failed[0].text, "started it anew");
	far_expect_waiting(far, b);
	anew.instance = 5001;
	a = far_join(far, 0, &layout, 0, &anew);
	far_expect(far, a, 0, NULL);
	far_expect(far, b, 0, NULL);
	/* What the old run still has under way is told why. */
	old = layout.job;
	layout.job = a->answer.job;
	ASSERT_TRUE(old != layout.job);
	layout.job = old;
	far_expect(far, far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 4, 0), -ECONNRESET,
		   "started it anew");
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), -ECONNRESET,
		   "started it anew");
}

/* Who has the cluster's key, and knows the job's name and whose it is, cannot end it by beginning it anew. */
TEST(another_cannot_begin_a_run_anew)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	struct join_change anew = { .instance = 5000 };
	struct asked *pending;

	far_form(far, &layout);
	pending = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 4, 0);
	for (uint32_t node = 0; node < 2; node++)
		far_expect(far, far_join(far, 5, &layout, node, &anew), -EACCES, "it runs, and");
	far_expect_waiting(far, pending);
	ASSERT_EQ(far->failed[0].n, 0);
	ASSERT_EQ(far_n_jobs(far), 1);
}

TEST(jobs_are_limited)
{
	FAR = far_new(&(struct far_options){ .max_jobs = 2 });
	struct layout a = far_layout("a", 2, NULL), b = far_layout("b", 1, NULL);
	struct layout c = far_layout("c", 1, NULL), d = c;

	(void)far_join(far, 0, &a, 0, NULL);
	far_form(far, &b);
	far_expect(far, far_join(far, 0, &c, 0, NULL), -EDQUOT, "max_jobs");
	d.job = 12345;
	far_expect(far, far_attach(far, 0, &d, 0, 1), -EDQUOT, "max_jobs");
	far_notice(far, 0, DATA_LEAVE, b.job, 0, 0, 0, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
	far_form(far, &c);
}

/* Of max_jobs, one place from which jobs come has its share: something is left for others. */
TEST(one_place_has_not_all_jobs)
{
	FAR = far_new(&(struct far_options){ .max_jobs = 4, .share = 50 });
	struct layout a = far_layout("a", 1, NULL), b = far_layout("b", 1, NULL);
	struct layout c = far_layout("c", 1, NULL), d = far_layout("d", 2, NULL);
	struct asked *other;

	far_form(far, &a);
	far_form(far, &b);
	far_expect(far, far_join(far, 0, &c, 0, NULL), -EDQUOT, "user_share");
	/* It is where the first comes from that counts. */
	other = far_join(far, 1, &d, 1, NULL);
	far_expect(far, far_join(far, 0, &d, 0, NULL), 0, NULL);
	far_expect(far, other, 0, NULL);
	far_take_joined(other, &d);
	for (unsigned i = 0; i < 2; i++)
		far_expect(far, far_attach(far, i, &d, i, FAR_INSTANCE + i), 0, NULL);
	/* What has ended is not counted. */
	for (unsigned i = 0; i < 2; i++)
		far_notice(far, i, DATA_LEAVE, d.job, 0, 0, i, 0, NULL);
	far_notice(far, 0, DATA_LEAVE, b.job, 0, 0, 0, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
	far_form(far, &c);
}

/* As many jobs of one node, one by one, as a user of the node has places for. */
static unsigned form_all(struct far *far, unsigned end, uint32_t user)
{
	struct join_change as = { .user = user };
	struct asked *asked;
	char name[32];

	for (unsigned n = 0;; n++) {
		struct layout layout;

		(void)snprintf(name, sizeof(name), "job-%zu", far_n_jobs(far));
		layout = far_layout(name, 1, NULL);
		asked = far_join(far, end, &layout, 0, &as);
		far_wait(far, asked);
		if (asked->status) {
			far_expect(far, asked, -EDQUOT, "user_share");
			return n;
		}
	}
}

/* Of what a place has, one of its users has a share, too: something is left for others there. */
TEST(one_user_of_a_place_has_not_all_its_jobs)
{
	FAR = far_new(&(struct far_options){ .max_jobs = 12, .share = 50 });

	ASSERT_EQ(form_all(far, 0, 1), 4);
	ASSERT_EQ(form_all(far, 0, 2), 2);
	ASSERT_EQ(form_all(far, 0, 1), 0);
	ASSERT_EQ(form_all(far, 1, 3), 2);
}

/* Messages no agent of ours would send. */
TEST(malformed_joins_are_refused)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each), l;
	static const uint32_t twice[] = { 1, 1 }, high[] = { 1, 4 };
	static const char long_name[] = "0123456789012345678901234567890123456789012345678901"
					"234567890123";
	static const char *const names[] = { "", "a b", "a/b", "\xc3\xa9", long_name };
	struct data_header junk = { .op = DATA_JOIN, .len = 3 };
	struct data_header empty = { .op = DATA_JOIN };

	for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
		l = layout;
		l.name = names[i];
		far_expect(far, far_join(far, 0, &l, 0, NULL), -EINVAL, "a job's name");
	}
	l = layout;
	l.request_timeout_ms = 0;
	far_expect(far, far_join(far, 0, &l, 0, NULL), -EINVAL, "request timeout of 0");
	far_expect(far, far_join(far, 0, &layout, 0, &(struct join_change){ .size = 20000 }),
		   -EINVAL, "size 20000 is not within");
	far_expect(far, far_join(far, 0, &layout, 0, &(struct join_change){ .n_nodes = 5 }),
		   -EINVAL, "5 nodes for 4 ranks");
	far_expect(far, far_join(far, 0, &layout, 2, NULL), -EINVAL, "node 2, but there are 2");
	far_expect(far, far_join(far, 0, &layout, 0, &(struct join_change){ .local_size = 1 }),
		   -EINVAL, "node 0 has 2 ranks, local size 1");
	far_expect(far, far_join(far, 0, &layout, 0, &(struct join_change){ .local_size = 5 }),
		   -EINVAL, "local size 5 and size 4");
	far_expect(
		far,
		far_join(far, 0, &layout, 0, &(struct join_change){ .ranks = twice, .n_ranks = 2 }),
		-EINVAL, "rank 1 twice");
	far_expect(
		far,
		far_join(far, 0, &layout, 0, &(struct join_change){ .ranks = high, .n_ranks = 2 }),
		-EINVAL, "rank 4, but size is 4");
	far_expect(far, far_join(far, 0, &layout, 0, &(struct join_change){ .part_bytes = 100 }),
		   -EINVAL, "part size 100");
	far_expect(far, far_join(far, 0, &layout, 0, &(struct join_change){ .node_name = "a\nb" }),
		   -EINVAL, "no valid name");
	far_expect(far, far_call(far, 0, &junk, "\xff\xff\xff"), -EPROTO, "not a JobJoin");
	far_expect(far, far_call(far, 0, &empty, NULL), -EPROTO, "not a JobJoin");
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* Every truncation and every flipped byte of a good message: answered, and nothing stays. */
TEST(damaged_joins_are_survived)
{
	FAR = far_new(NULL);
	Bps__Cluster__JobJoin m = BPS__CLUSTER__JOB_JOIN__INIT;
	struct data_header header = { .op = DATA_JOIN };
	uint32_t ranks[] = { 0, 1 };
	_cleanup_(freep) uint8_t *good = NULL;
	uint8_t digest[32] = { 0 };
	size_t len = 0;

	m.job = (char *)"job";
	m.secret_digest = (ProtobufCBinaryData){ sizeof(digest), digest };
	m.size = 4;
	m.n_nodes = 2;
	m.local_size = 2;
	m.n_ranks = 2;
	m.ranks = ranks;
	m.epoch = FAR_EPOCH;
	m.view_digest = view_server_digest(far->view);
	m.request_timeout_ms = 1000;
	m.timeout_ms = 1000;
	ASSERT_OK(pack(&m.base, DATA_SETUP_MAX, (void **)&good, &len));
	for (size_t i = 0; i < len; i++) {
		uint8_t bytes[256];

		header.len = (uint32_t)i;
		far_expect(far, far_call(far, 0, &header, good), -EPROTO, NULL);
		for (unsigned bit = 0; bit < 8; bit++) {
			memcpy(bytes, good, len);
			bytes[i] ^= (uint8_t)(1 << bit);
			header.len = (uint32_t)len;
			(void)far_call(far, 0, &header, bytes);
		}
	}
	far_lose(far, 0);
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* A server that is not the job's home learns of it by the first attach. */
TEST(attach_begins_a_job)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each), other;

	layout.job = 4711;
	far_expect(far, far_attach(far, 0, &layout, 0, 1), 0, NULL);
	far_expect(far, far_attach(far, 0, &layout, 0, 1), 0, NULL); /* once more is harmless */
	ASSERT_EQ(far_n_jobs(far), 1);
	other = layout;
	other.node_of_rank[1] = 1;
	far_expect(far, far_attach(far, 1, &other, 1, 2), -EINVAL, "another layout");
	other = layout;
	other.request_timeout_ms = 1;
	far_expect(far, far_attach(far, 1, &other, 1, 2), -EINVAL, "another request timeout");
	other = layout;
	other.name = "jab";
	far_expect(far, far_attach(far, 1, &other, 1, 2), -EINVAL, "another name");
	other = far_layout("job", 3, two_each);
	other.job = layout.job;
	far_expect(far, far_attach(far, 1, &other, 1, 2), -EINVAL, "another size");
	other.size = 4;
	other.node_of_rank[3] = 2;
	far_expect(far, far_attach(far, 1, &other, 1, 2), -EINVAL, "another number of nodes");
	far_expect(far, far_attach(far, 2, &layout, 0, 3), -EACCES,
		   "end2 does not speak for node 0");
	far_expect(far, far_attach(far, 1, &layout, 1, 2), 0, NULL);
	far_expect(far, far_declare(far, 0, &layout, 0, "t", DTYPE_INT8, 1, 0), -EPROTO,
		   "not its home");
}

TEST(attach_at_home_must_be_who_joined)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);

	far_form(far, &layout);
	far_expect(far, far_attach(far, 1, &layout, 0, FAR_INSTANCE), -EACCES, "does not speak");
	far_expect(far, far_attach(far, 0, &layout, 0, 1), -EACCES, "does not speak");
}

TEST(malformed_attaches_are_refused)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each), l;
	struct data_header junk = { .op = DATA_ATTACH, .len = 3 };

	far_expect(far, far_attach(far, 0, &layout, 0, 1), -EPROTO, "without number");
	layout.job = 1;
	l = layout;
	l.node_of_rank[2] = 2;
	far_expect(far, far_attach(far, 0, &l, 0, 1), -EINVAL, "rank 2 on node 2 of 2");
	l = layout;
	l.node_of_rank[2] = l.node_of_rank[3] = 0;
	far_expect(far, far_attach(far, 0, &l, 0, 1), -EINVAL, "a node without ranks");
	far_expect(far, far_attach(far, 0, &layout, 2, 1), -EINVAL, "node 2");
	l = layout;
	l.size = 0;
	far_expect(far, far_attach(far, 0, &l, 0, 1), -EINVAL, "size 0");
	l = layout;
	l.request_timeout_ms = 0;
	far_expect(far, far_attach(far, 0, &l, 0, 1), -EINVAL, "timeout");
	far_expect(far, far_call(far, 0, &junk, "abc"), -EPROTO, "not a JobAttach");
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(newer_run_ends_the_older_elsewhere)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);

	layout.job = 1;
	far_expect(far, far_attach(far, 0, &layout, 0, 10), 0, NULL);
	far_expect(far, far_attach(far, 1, &layout, 1, 11), 0, NULL);
	layout.job = 2;
	far_expect(far, far_attach(far, 0, &layout, 0, 20), 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
	ASSERT_EQ(far->failed[1].n, 1);
	ASSERT_EQ(far->failed[0].n, 0);
	ASSERT_CONTAINS(far->failed[1].text, "node 0 has started the job anew");
}

TEST(lost_peer_ends_the_job)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each), other = far_layout("b", 2, NULL);
	struct asked *pending;

	far_form(far, &layout);
	other.job = 99;
	far_expect(far, far_attach(far, 0, &other, 0, 1), 0, NULL);
	pending = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 4, 0);
	far_lose(far, 1);
	far_expect(far, pending, -ECONNRESET,
		   "job job: ranks 2, 3 (node 1): end1 was lost: connection reset");
	ASSERT_EQ(far->failed[0].n, 1);
	ASSERT_EQ(far->failed[2].n, 1);
	ASSERT_EQ(far->failed[2].status, -ECONNRESET);
	ASSERT_CONTAINS(far->failed[2].text, "ranks 2, 3 (node 1): end1 was lost");
	/* The other job did not feel it. */
	ASSERT_EQ(far_n_jobs(far), 1);
	/* Nor the next run. */
	layout.job = 0;
	far_form(far, &layout);
}

TEST(fail_job_goes_to_the_others)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, NULL);

	far_form(far, &layout);
	/* A stranger has no say. */
	far_notice(far, 5, DATA_FAIL_JOB, layout.job, 0, 0, 1, EIO, "boo");
	ASSERT_EQ(far_n_jobs(far), 1);
	far_notice(far, 1, DATA_FAIL_JOB, layout.job, 0, 0, 1, ECONNRESET, "rank 1 (pid 7)\ndied");
	ASSERT_EQ(far_n_jobs(far), 0);
	ASSERT_EQ(far->failed[1].n, 0);
	ASSERT_EQ(far->failed[0].n, 1);
	ASSERT_EQ(far->failed[2].n, 1);
	ASSERT_STR(far->failed[0].text, "rank 1 (pid 7)?died");
	ASSERT_EQ(far->failed[0].status, -ECONNRESET);
	/* Echoes are ignored. */
	far_notice(far, 0, DATA_FAIL_JOB, layout.job, 0, 0, 0, EIO, "echo");
	ASSERT_EQ(far->failed[2].n, 1);
	far_expect(far, far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 4, 0), -ECONNRESET,
		   "rank 1 (pid 7)?died");
}

/* Of the secret digest that jobs have here, 8 bytes. */
#define OWNER UINT64_C(0x7373737373737373)

/* Notices may overtake calls: an attach that comes after the end must not begin the job again. */
TEST(fail_job_overtakes_attach)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);

	layout.job = 31;
	far_notice(far, 1, DATA_FAIL_JOB, 31, OWNER, OWNER, 1, EPIPE, NULL);
	far_expect(far, far_attach(far, 0, &layout, 0, 1), -EPIPE, "Broken pipe");
	ASSERT_EQ(far_n_jobs(far), 0);
}

/* A daemon that is in the cluster, knows all of a job but its secret, and is none of its nodes. */
TEST(a_number_alone_ends_and_begins_nothing)
{
	FAR = far_new(NULL);
	struct join_change secret = { .secret = "sesame" };
	struct layout layout = far_layout("job", 2, NULL), ours = far_layout("ours", 2, NULL);
	struct asked *a, *b;

	/* Before it has attached here, as after this process has begun anew. */
	ours.job = 31;
	for (unsigned i = 0; i < 100; i++)
		far_notice(far, 5, DATA_FAIL_JOB, 31, i, OWNER, 1, EPIPE, NULL);
	far_expect(far, far_attach(far, 0, &ours, 0, 1), 0, NULL);
	far_expect(far, far_attach(far, 1, &ours, 1, 1), 0, NULL);
	/* Before a node has: that it has another owner is seen before anything else that it says. */
	a = far_join(far, 0, &layout, 0, &secret);
	b = far_join(far, 1, &layout, 1, &secret);
	far_expect(far, b, 0, NULL);
	far_expect(far, a, 0, NULL);
	layout.job = a->answer.job;
	far_expect(far, far_attach(far, 5, &layout, 0, 1), -EINVAL, "another name or owner");
	ASSERT_EQ(far_n_jobs(far), 2);
}

TEST(no_memory_for_a_notice_drops_the_peer)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);

	far_form(far, &layout);
	far_no_memory(far, 0);
	far_lose(far, 1);
	ASSERT_TRUE(far_killed(far, 0));
}

TEST(all_leave)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);

	far_form(far, &layout);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	far_lose(far, 0);
	ASSERT_EQ(far_n_jobs(far), 1);
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
	ASSERT_EQ(far->failed[0].n + far->failed[1].n, 0);
	layout.job = 0;
	far_form(far, &layout);
}

/* Of a job that some have left, the others are asked whether they need this process any more: once, until they attach anew. */
TEST(a_server_stops_when_nothing_is_under_way)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, NULL), other = far_layout("other", 2, NULL);

	far_form(far, &layout);
	far_form(far, &other);
	ASSERT_EQ(server_stop(far->server), 0);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	/* What it was not asked says nothing. */
	far_notice(far, 1, DATA_IDLE, layout.job, 0, 0, 1, 0, NULL);
	ASSERT_EQ(server_stop(far->server), 2);
	ASSERT_EQ(server_stop(far->server), 2);
	for (unsigned i = 0; i < 3; i++)
		ASSERT_EQ(far->told[i].stopping, i ? 1 : 0);
	far_notice(far, 1, DATA_IDLE, layout.job, 0, 0, 1, 0, NULL);
	ASSERT_EQ(server_stop(far->server), 1);
	/* Another speaks for itself alone. */
	far_notice(far, 1, DATA_IDLE, layout.job, 0, 0, 2, 0, NULL);
	ASSERT_EQ(server_stop(far->server), 1);
	far_notice(far, 2, DATA_LEAVE, layout.job, 0, 0, 2, 0, NULL);
	ASSERT_EQ(server_stop(far->server), 0);
	far_notice(far, 1, DATA_LEAVE, layout.job, 0, 0, 1, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
	/* One that would not understand, or has no memory for it at first; one that is lost. */
	far_notice(far, 0, DATA_LEAVE, other.job, 0, 0, 0, 0, NULL);
	far_old(far, 1, true);
	ASSERT_EQ(server_stop(far->server), 0);
	far_old(far, 1, false);
	far_no_memory(far, 1);
	ASSERT_EQ(server_stop(far->server), 1);
	ASSERT_EQ(far->told[1].stopping, 1);
	ASSERT_EQ(server_stop(far->server), 1);
	ASSERT_EQ(far->told[1].stopping, 2);
	far_lose(far, 1);
	ASSERT_EQ(server_stop(far->server), 0);
}

/* All that attached here have left, the others never came: it does not stay for ever. */
TEST(abandoned_job_is_given_up)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL);

	layout.job = 8;
	layout.request_timeout_ms = 50;
	far_expect(far, far_attach(far, 0, &layout, 0, 1), 0, NULL);
	far_notice(far, 0, DATA_LEAVE, 8, 0, 0, 0, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 1);
	while (far_n_jobs(far))
		ASSERT_OK(loop_turn(far->loop, 1000));
	ASSERT_EQ(far->failed[0].n, 0);
	far_expect(far, far_attach(far, 1, &layout, 1, 2), -ENOTCONN, "all its ranks have left");
	/* When they do come, it goes on. */
	layout.job = 9;
	far_expect(far, far_attach(far, 0, &layout, 0, 2), 0, NULL);
	far_notice(far, 0, DATA_LEAVE, 9, 0, 0, 0, 0, NULL);
	far_expect(far, far_attach(far, 1, &layout, 1, 2), 0, NULL);
	ASSERT_OK(loop_turn(far->loop, 100));
	ASSERT_OK(loop_turn(far->loop, 100));
	ASSERT_EQ(far_n_jobs(far), 1);
}

/* An agent may lose its trainers between joining and attaching, and not know the job that it is in. */
TEST(nodes_that_do_not_attach_end_the_job)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 3, two_each);
	struct asked *a;

	layout.timeout_ms = 60;
	a = far_join(far, 0, &layout, 0, NULL);
	(void)far_join(far, 1, &layout, 1, NULL);
	far_expect(far, far_join(far, 2, &layout, 2, NULL), 0, NULL);
	layout.job = a->answer.job;
	far_expect(far, far_attach(far, 0, &layout, 0, FAR_INSTANCE), 0, NULL);
	while (far_n_jobs(far))
		ASSERT_OK(loop_turn(far->loop, 1000));
	for (unsigned i = 0; i < 3; i++) {
		ASSERT_EQ(far->failed[i].n, 1);
		ASSERT_EQ(far->failed[i].status, -ETIMEDOUT);
		ASSERT_STR(far->failed[i].text,
			   "job job: ranks 2-5 have joined but not attached within 0.06 s");
	}
}

TEST(forming_jobs_say_whom_they_wait_for)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, two_each);
	_cleanup_(freep) struct server_job_info *jobs = NULL;
	size_t n;

	(void)far_join(far, 0, &layout, 0, NULL);
	ASSERT_OK(server_jobs(far->server, &jobs, &n));
	ASSERT_STR(jobs[0].state, "forming");
	ASSERT_CONTAINS(jobs[0].waiting_for, "ranks 2, 3 to join for 0.");
}

TEST(closing_answers_everybody)
{
	FAR = far_new(NULL);
	struct layout layout = far_layout("job", 2, NULL), other = far_layout("b", 2, NULL);
	struct asked *joining, *declaring;

	far_form(far, &layout);
	joining = far_join(far, 0, &other, 0, NULL);
	declaring = far_declare(far, 0, &layout, 0, "t", DTYPE_FLOAT32, 4, 0);
	server_close(far->server);
	server_close(far->server);
	far_expect(far, joining, -ESHUTDOWN, "shutting down");
	far_expect(far, declaring, -ESHUTDOWN, "shutting down");
	far_expect(far, far_join(far, 0, &other, 0, NULL), -ESHUTDOWN, NULL);
	far_notice(far, 0, DATA_LEAVE, layout.job, 0, 0, 0, 0, NULL);
	ASSERT_EQ(far_n_jobs(far), 0);
}

TEST(not_every_message_is_a_call)
{
	FAR = far_new(NULL);
	struct data_header header = { .op = DATA_RESULT };

	far_expect(far, far_call(far, 0, &header, NULL), -EPROTO, "not a call");
	header.op = DATA_PUSH;
	header.key = header.round = 1;
	header.operation = OPERATION_BARRIER;
	far_expect(far, far_call(far, 0, &header, NULL), -EPROTO, "no such job");
}
