/* The sources that need nobody else: single and static. */
#include "cluster/cluster.h"
#include "test.h"

struct fixture {
	struct loop *loop;
	struct cluster *cluster;
	struct cluster_params params;
	unsigned n_views;
	struct failure failure;
	char path[64];
};

static void on_view(void *user, struct view *view)
{
	((struct fixture *)user)->n_views++;
}

static void on_key(void *user, const void *key, size_t len)
{
	test_fail(__FILE__, __LINE__, "no key comes from here");
}

static void on_failed(void *user, const struct failure *failure)
{
	test_fail(__FILE__, __LINE__, "%s", failure->text);
}

static void init(struct fixture *f, const char *source)
{
	*f = (struct fixture){ 0 };
	ASSERT_OK(loop_new(&f->loop));
	(void)snprintf(f->path, sizeof(f->path), "%s/cluster.conf", test_dir());
	f->params = (struct cluster_params){
		.loop = f->loop,
		.source = source,
		.file = f->path,
		.self = { .id = 7, .name = "a", .roles = ROLE_AGENT | ROLE_SERVER },
		.view_changed = on_view,
		.data_key_known = on_key,
		.failed = on_failed,
		.user = f,
	};
}

static void write_file(struct fixture *f, const char *text)
{
	FILE *file = fopen(f->path, "we");

	ASSERT_TRUE(file);
	ASSERT_TRUE(fputs(text, file) >= 0);
	ASSERT_EQ(fclose(file), 0);
}

static void start(struct fixture *f)
{
	ASSERT_OK(cluster_new(&f->params, &f->cluster));
	ASSERT_OK(cluster_start(f->cluster, &f->failure));
}

static void stop(struct fixture *f)
{
	cluster_free(f->cluster);
	loop_free(f->loop);
}

struct asked {
	struct cluster_query query;
	bool is_done;
	uint32_t epoch;
	struct failure failure;
	struct cluster *close_in; /* closes the job from within done() */
};

static void on_done(struct cluster_query *query, struct view *view, const struct failure *failure)
{
	struct asked *a = container_of(query, struct asked, query);

	ASSERT_TRUE(!a->is_done);
	a->is_done = true;
	if (view)
		a->epoch = view->epoch;
	else
		a->failure = *failure;
	if (a->close_in)
		cluster_close_job(a->close_in, query->job, 0);
}

static void ask(struct fixture *f, struct asked *a, const char *job, uint32_t min_servers,
		uint64_t timeout_ms)
{
	*a = (struct asked){
		.query = { .min_servers = min_servers, .timeout_ms = timeout_ms, .done = on_done }
	};
	(void)snprintf(a->query.job, sizeof(a->query.job), "%s", job);
	cluster_open_job(f->cluster, &a->query);
	ASSERT_TRUE(!a->is_done);
}

#define UNTIL(f, condition)                                            \
	do {                                                           \
		while (!(condition))                                   \
			ASSERT_INT(loop_turn((f)->loop, 1000), >=, 0); \
	} while (0)

TEST(single)
{
	struct fixture f;
	struct asked a;
	struct view *view;

	init(&f, "single");
	start(&f);
	ASSERT_EQ(f.n_views, 1);
	view = cluster_view(f.cluster);
	ASSERT_EQ(view->epoch, 1);
	ASSERT_EQ(view->n_members, 1);
	ASSERT_TRUE(view->members[0].is_self);
	ASSERT_EQ(view->members[0].roles, ROLE_AGENT | ROLE_SERVER | ROLE_COORDINATOR);
	ASSERT_STR(view->members[0].address, "");
	ASSERT_TRUE(cluster_view_of(f.cluster, 1) == view);
	ASSERT_TRUE(!cluster_view_of(f.cluster, 2));
	ask(&f, &a, "job", 1, 1000);
	UNTIL(&f, a.is_done);
	ASSERT_EQ(a.epoch, 1);
	cluster_close_job(f.cluster, "job", 0);
	cluster_close_job(f.cluster, "job", 0);
	/* At once, not after a timeout: waiting would not help. */
	ask(&f, &a, "job", 2, 3600000);
	UNTIL(&f, a.is_done);
	ASSERT_EQ(a.failure.status, -ENOENT);
	ASSERT_CONTAINS(a.failure.text, "2 servers are wanted, and this daemon is alone");
	ASSERT_OK(cluster_reload(f.cluster, &f.failure));
	stop(&f);
}

TEST(unknown_source)
{
	struct fixture f;

	init(&f, "guess");
	ASSERT_EQ(cluster_new(&f.params, &f.cluster), -EINVAL);
	loop_free(f.loop);
}

TEST(static_list)
{
	struct fixture f;
	struct view *view;

	init(&f, "static");
	write_file(&f, "[node b]\naddress=b:1\n[node a]\naddress=a:1\n");
	start(&f);
	ASSERT_EQ(f.n_views, 1);
	view = cluster_view(f.cluster);
	ASSERT_EQ(view->n_members, 2);
	ASSERT_STR(view->members[0].name, "a");
	ASSERT_TRUE(view->members[0].is_self && !view->members[1].is_self);
	ASSERT_EQ(view->members[0].id, 0);
	stop(&f);
}

TEST(static_epoch_is_of_the_list)
{
	struct fixture f;
	uint32_t epoch;

	init(&f, "static");
	write_file(&f, "[node a]\naddress=a:1\n[node b]\naddress=b:1\n");
	start(&f);
	epoch = cluster_view(f.cluster)->epoch;
	stop(&f);

	/* Another node, the same list in another order. */
	init(&f, "static");
	memcpy(f.params.self.name, "b", 2);
	write_file(&f, "[node b]\nroles=server,agent\naddress=b:1\n\n[node a]\naddress=a:1\n");
	start(&f);
	ASSERT_EQ(cluster_view(f.cluster)->epoch, epoch);
	stop(&f);
}

TEST(static_reload)
{
	struct fixture f;
	struct asked a, b;
	uint32_t first, second;

	init(&f, "static");
	write_file(&f, "[node a]\naddress=a:1\n");
	start(&f);
	first = cluster_view(f.cluster)->epoch;
	ask(&f, &a, "old", 1, 1000);
	UNTIL(&f, a.is_done);
	ASSERT_EQ(a.epoch, first);

	/* Unchanged, then bad, then one more. */
	ASSERT_OK(cluster_reload(f.cluster, &f.failure));
	ASSERT_EQ(f.n_views, 1);
	write_file(&f, "[node a]\naddress=a:1\n[node\n");
	ASSERT_EQ(cluster_reload(f.cluster, &f.failure), -EINVAL);
	ASSERT_CONTAINS(f.failure.text, ":3: ");
	ASSERT_EQ(cluster_view(f.cluster)->epoch, first);
	ask(&f, &b, "new", 2, 20000);
	ASSERT_INT(loop_turn(f.loop, 0), >=, 0);
	ASSERT_TRUE(!b.is_done);
	write_file(&f, "[node a]\naddress=a:1\n[node b]\naddress=b:1\n");
	ASSERT_OK(cluster_reload(f.cluster, &f.failure));
	ASSERT_EQ(f.n_views, 2);
	UNTIL(&f, b.is_done);
	second = cluster_view(f.cluster)->epoch;
	ASSERT_TRUE(second != first);
	ASSERT_EQ(b.epoch, second);

	/* A job stays in its view, which stays known. */
	ask(&f, &a, "old", 1, 1000);
	UNTIL(&f, a.is_done);
	ASSERT_EQ(a.epoch, first);
	ASSERT_TRUE(cluster_view_of(f.cluster, first));
	for (int i = 0; i < 40; i++) {
		char text[128];

		(void)snprintf(text, sizeof(text), "[node a]\naddress=a:%d\n", i + 2);
		write_file(&f, text);
		ASSERT_OK(cluster_reload(f.cluster, &f.failure));
	}
	ASSERT_TRUE(cluster_view_of(f.cluster, first));
	cluster_close_job(f.cluster, "old", 0);
	ASSERT_TRUE(!cluster_view_of(f.cluster, first));
	ask(&f, &a, "old", 1, 1000);
	UNTIL(&f, a.is_done);
	ASSERT_EQ(a.epoch, cluster_view(f.cluster)->epoch);
	stop(&f);
}

TEST(static_errors)
{
	static const struct {
		const char *text, *expected;
		int r;
	} errors[] = {
		{ "[node b]\naddress=b:1\n[node c]\naddress=c:1\n",
		  "no [node a], which is this node: add it, or set the option node to one of b, c",
		  -ENOENT },
		{ "[node a]\n", ":1: node a is a server and has no address", -EINVAL },
	};
	struct fixture f;

	for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
		init(&f, "static");
		write_file(&f, errors[i].text);
		ASSERT_OK(cluster_new(&f.params, &f.cluster));
		ASSERT_EQ(cluster_start(f.cluster, &f.failure), errors[i].r);
		ASSERT_CONTAINS(f.failure.text, f.path);
		ASSERT_CONTAINS(f.failure.text, errors[i].expected);
		stop(&f);
	}
	init(&f, "static");
	f.params.self.roles = ROLE_AGENT;
	write_file(&f, "[node a]\naddress=a:1\n");
	ASSERT_OK(cluster_new(&f.params, &f.cluster));
	ASSERT_EQ(cluster_start(f.cluster, &f.failure), -EINVAL);
	ASSERT_CONTAINS(f.failure.text, "node a is a server there");
	stop(&f);
}

TEST(timeout_says_who_is_there)
{
	struct fixture f;
	struct asked a;

	init(&f, "static");
	write_file(&f, "[node a]\naddress=a:1\n[node b]\nroles=agent\n");
	start(&f);
	ask(&f, &a, "job", 3, 30);
	UNTIL(&f, a.is_done);
	ASSERT_EQ(a.failure.status, -ETIMEDOUT);
	ASSERT_CONTAINS(a.failure.text, "job job: 3 servers are wanted, 1 is there: a in ");
	ASSERT_CONTAINS(a.failure.text, f.path);
	stop(&f);
}

TEST(cancel_and_close)
{
	struct fixture f;
	struct asked a, b, c;

	init(&f, "single");
	start(&f);
	ask(&f, &a, "job", 1, 1000);
	ask(&f, &b, "job", 1, 1000);
	cluster_cancel(f.cluster, &a.query);
	cluster_cancel(f.cluster, &a.query);
	b.close_in = f.cluster;
	UNTIL(&f, b.is_done);
	ASSERT_TRUE(!a.is_done);
	cluster_cancel(f.cluster, &b.query);
	/* One that is never told, and one that outlives the cluster's end. */
	ask(&f, &a, "other", 1, 1000);
	cluster_cancel(f.cluster, &a.query);
	ask(&f, &c, "third", 1, 1000);
	cluster_close(f.cluster);
	cluster_close(f.cluster);
	ASSERT_INT(loop_turn(f.loop, 0), >=, 0);
	ASSERT_TRUE(!c.is_done);
	stop(&f);
}
