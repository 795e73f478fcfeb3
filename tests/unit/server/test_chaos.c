/*
 * Random walks over everything that can come to a server, in orders and shapes that no agent of ours would choose.
 * Whatever happens: each call is answered once, a sum is that of all nodes' contributions and of nothing else, and at
 * the end nothing is held. The walks are fixed by their seeds; only when the pool's threads finish is not.
 */
#include "double.h"
#include "server/job/store.h"

#define NODES 3
#define STEPS 4000

struct walk {
	struct far *far;
	uint64_t state;
	struct layout layout;
	struct asked *joins[NODES]; /* of the newest run */
	uint64_t instance;
	uint64_t old_job;
	unsigned n_results;
};

static uint32_t below(struct walk *w, uint32_t n)
{
	w->state = w->state * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)((w->state >> 33) % n);
}

static void step_join(struct walk *w)
{
	uint32_t node = below(w, NODES);
	struct join_change change = { .instance = w->instance + node };
	struct asked *asked;

	if (!below(w, 8))
		change.size = 1 + below(w, 8);
	if (!below(w, 30))
		change.secret = "wrong";
	if (!below(w, 30))
		change.no_ranks = true;
	if (!below(w, 30))
		change.local_size = 2;
	if (!below(w, 30))
		change.instance = ++w->instance;
	asked = far_join(w->far, below(w, 20) ? node : below(w, FAR_ENDS), &w->layout, node,
			 &change);
	w->joins[node] = asked;
}

/* Takes the number of the run from whichever node was told it. */
static void learn(struct walk *w)
{
	for (uint32_t i = 0; i < NODES; i++) {
		struct asked *join = w->joins[i];

		if (!join || !join->done || join->status || join->answer.job == w->layout.job)
			continue;
		w->old_job = w->layout.job;
		w->layout.job = join->answer.job;
	}
}

static void step_attach(struct walk *w)
{
	uint32_t node = below(w, NODES);
	struct layout layout = w->layout;

	if (!below(w, 20))
		layout.job = w->old_job;
	if (!below(w, 40))
		layout.node_of_rank[0] = 1;
	(void)far_attach(w->far, below(w, 20) ? node : below(w, FAR_ENDS), &layout, node,
			 w->instance + node);
}

static void step_declare(struct walk *w)
{
	static const char *const names[] = { "a", "b", "c", "d" };
	uint32_t node = below(w, NODES);

	(void)far_declare(w->far, node, &w->layout, node, names[below(w, 4)],
			  below(w, 10) ? DTYPE_FLOAT32 : DTYPE_INT8, 16, node);
}

static struct data_header random_header(struct walk *w, uint32_t node)
{
	static const uint8_t moves[] = { OPERATION_BROADCAST, OPERATION_ALL_GATHER,
					 OPERATION_ALL_TO_ALL };
	struct data_header h = far_push(&w->layout, 1 + below(w, 3), 1 + below(w, 40), node);

	h.part = below(w, 2);
	h.total = h.part_len = h.len = 16;
	if (!below(w, 4)) {
		h.operation = moves[below(w, 3)];
		h.reduction = 0;
		h.block = below(w, 10);
		h.root = below(w, 4);
		h.len = below(w, 2) ? 16 : 0;
	}
	if (!below(w, 20))
		h.reduction = h.reduction ? REDUCTION_MAX : 0;
	if (!below(w, 20))
		h.total = 32;
	if (!below(w, 40))
		h.job = w->old_job;
	return h;
}

/* Node i gives 2^i: a sum that lacks a node, or has one twice, shows. */
static void step_push(struct walk *w)
{
	uint32_t node = below(w, NODES);
	struct data_header h = random_header(w, node);
	float values[4];

	for (unsigned i = 0; i < 4; i++)
		values[i] = (float)(1 << node);
	(void)far_call(w->far, below(w, 40) ? node : below(w, FAR_ENDS), &h, values);
}

/* All nodes push one round, so that much gets through whatever else goes on. */
static void step_round(struct walk *w)
{
	uint64_t key = 1 + below(w, 3), round = 1 + below(w, 40);

	for (uint32_t k = 0, first = below(w, NODES); k < NODES; k++) {
		uint32_t node = (first + k) % NODES;
		struct data_header h = far_push(&w->layout, key, round, node);
		float values[4];

		for (unsigned i = 0; i < 4; i++)
			values[i] = (float)(1 << node);
		h.total = h.part_len = h.len = 16;
		(void)far_call(w->far, node, &h, values);
	}
}

static void step_notice(struct walk *w)
{
	static const uint8_t ops[] = { DATA_FAIL_ROUND, DATA_FAIL_ROUND, DATA_FAIL_ROUND,
				       DATA_FAIL_JOB, DATA_LEAVE };
	uint32_t node = below(w, NODES);
	unsigned op = ops[below(w, 5)];
	uint64_t job = below(w, 10) ? w->layout.job : w->old_job;

	far_notice(w->far, node, op, job, 1 + below(w, 4), 1 + below(w, 40), node,
		   op == DATA_LEAVE ? 0 : ECANCELED, op == DATA_LEAVE ? NULL : "because");
	if (op == DATA_FAIL_JOB)
		w->instance += 100;
}

static void step_lose(struct walk *w)
{
	far_lose(w->far, below(w, FAR_ENDS));
	w->instance += 100;
}

static void step(struct walk *w)
{
	uint32_t what = below(w, 1000);

	if (what < 150)
		step_join(w);
	else if (what < 350)
		step_attach(w);
	else if (what < 400)
		step_declare(w);
	else if (what < 700)
		step_push(w);
	else if (what < 950)
		step_round(w);
	else if (what < 960)
		step_notice(w);
	else if (what < 962)
		step_lose(w);
	else
		w->far->ops->settle(
			w->far); /* what the pool sums comes back, however slow its threads are */
	learn(w);
}

static void check_results(struct walk *w)
{
	for (struct asked *a = w->far->all; a; a = a->next) {
		const float *values = a->data;

		if (!a->done || a->status || a->answer.op != DATA_RESULT ||
		    a->answer.reduction != REDUCTION_SUM)
			continue;
		ASSERT_EQ(a->answer.len, 16);
		for (unsigned i = 0; i < 4; i++)
			ASSERT_TRUE(values[i] == (1 << NODES) - 1);
		w->n_results++;
	}
}

static unsigned walk(uint64_t seed, const struct far_options *options)
{
	_cleanup_(far_freep) struct far *far = far_new(options);
	struct walk w = {
		.far = far,
		.state = seed,
		.layout = far_layout("job", NODES, NULL),
		.instance = 1,
	};

	for (unsigned i = 0; i < STEPS; i++)
		step(&w);
	server_close(far->server);
	for (struct asked *a = far->all; a; a = a->next)
		far_wait(far, a);
	check_results(&w);
	return w.n_results;
}

static void walks(uint64_t first, const struct far_options *options)
{
	unsigned n = 0;

	for (uint64_t seed = first; seed < first + 8; seed++)
		n += walk(seed, options);
	/* Otherwise it would prove little. */
	ASSERT_INT(n, >, 1000);
}

TEST(on_the_control_thread)
{
	walks(1, &(struct far_options){ .inline_bytes = 1 << 20 });
}

TEST(in_the_pool)
{
	walks(100, &(struct far_options){ .n_threads = 2 });
}

TEST(with_little_room)
{
	walks(200, &(struct far_options){ .quota_bytes = 30000, .max_tensors = 3, .max_jobs = 2 });
}
