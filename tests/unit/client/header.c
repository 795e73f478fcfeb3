/*
 * bps.h alone, as a stranger includes it: C99 and C++11, pedantic. Uses every function, structure field, constant and
 * macro; a run calls them without a daemon. check-header compares the list.
 */
#include <bps.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void expect(int is_true, const char *what)
{
	if (is_true)
		return;
	fprintf(stderr, "%s: not so; bps_error() says: %s\n", what, bps_error());
	exit(EXIT_FAILURE);
}
#define EXPECT(x) expect((x) ? 1 : 0, #x)

static void use_client(void)
{
	struct bps_open_params open_params;
	struct bps_join_params join;
	struct bps_status status;
	struct bps_begun begun;
	struct bps_client *client = NULL;

	memset(&open_params, 0, sizeof(open_params));
	open_params.size = sizeof(open_params);
	open_params.socket = "/nonexistent/socket";
	open_params.timeout_ms = 1;
	EXPECT(bps_client_open(&open_params, &client) < 0);
	EXPECT(client == NULL);
	EXPECT(*bps_error());

	memset(&join, 0, sizeof(join));
	join.size = sizeof(join);
	EXPECT(bps_join_params_from_environment(&join) == 0);
	EXPECT(bps_join_params_from_settings(&join) == 0);
	join.job = "job";
	join.secret = "secret";
	join.secret_len = strlen("secret");
	join.rank = join.local_rank = join.node = 0;
	join.world_size = join.local_size = join.n_nodes = 1;
	join.timeout_ms = join.request_timeout_ms = 1000;
	join.min_servers = join.part_bytes = 0;
	join.force_distributed = 0;
	join.gpu_reduce = BPS_GPU_REDUCE_AUTO;
	join.gpu_roots = 0;
	join.quorum = join.staleness = 0;
	join.asynchronous = 0;
	join.quorum_timeout_ms = 0;
	join.elastic = join.newcomer = 0;
	join.min_ranks = join.max_ranks = 0;
	EXPECT(bps_client_join(client, &join) < 0);
	EXPECT(bps_client_leave(client) < 0);
	EXPECT(bps_client_regroup(client) < 0);
	status.size = sizeof(status);
	status.run = status.n_rounds = status.n_bytes = status.n_under_way = 0;
	status.world_size = status.n_nodes = status.n_here = 0;
	status.state[0] = status.waiting_for[0] = status.node[0] = status.cluster[0] = 0;
	EXPECT(bps_client_status(client, &status) < 0);
	EXPECT(bps_client_follow(client, 1, 0) < 0);
	begun.size = sizeof(begun);
	begun.name[0] = 0;
	begun.dtype = BPS_FLOAT32;
	begun.elements = begun.round = 0;
	begun.operation = BPS_REFUSE;
	begun.reduction = 0;
	EXPECT(bps_client_begun(client, 0, &begun) < 0);
	EXPECT(bps_client_fd(client) < 0);
	EXPECT(bps_client_dispatch(client) < 0);
	EXPECT(bps_client_rank(client) < 0);
	EXPECT(bps_client_size(client) < 0);
	EXPECT(bps_client_local_rank(client) < 0);
	EXPECT(bps_client_local_size(client) < 0);
	EXPECT(bps_client_node(client) < 0);
	EXPECT(bps_client_notice(client) == NULL);
	EXPECT(bps_cuda_release(client, NULL, 0) < 0);
	bps_client_abort(client, "an error");
	bps_client_close(client);
}

static void use_memory(void)
{
	struct bps_memory *memory = NULL;

	EXPECT(bps_memory_alloc(NULL, 1, &memory) < 0);
	EXPECT(bps_memory_import(NULL, -1, NULL, 1, &memory) < 0);
	EXPECT(bps_memory_data(memory) == NULL);
	EXPECT(bps_memory_len(memory) == 0);
	bps_memory_free(memory);
}

static void use_operations(void)
{
	struct bps_submit_params params;
	struct bps_tensor *tensor = NULL;
	struct bps_request *request = NULL;
	struct bps_outcome outcome = { sizeof(outcome), 0, 0, 0, 0, 0 };
	uint64_t rows = 0;

	EXPECT(bps_tensor_declare(NULL, "t", BPS_FLOAT32, BPS_VARIABLE, &tensor) < 0);
	EXPECT(bps_tensor_declare_shaped(NULL, "t", BPS_FLOAT32, NULL, 0, &tensor) < 0);
	EXPECT(bps_tensor_wait(tensor, BPS_FOREVER) < 0);
	memset(&params, 0, sizeof(params));
	params.size = sizeof(params);
	params.operation = BPS_PUSH_PULL;
	params.reduction = BPS_SUM;
	params.input = NULL;
	params.output = NULL;
	params.input_count = params.output_count = 0;
	params.counts = params.receive_counts = NULL;
	params.root = 0;
	params.priority = 1;
	params.timeout_ms = 0;
	params.width = 0;
	params.input_rows = NULL;
	params.output_rows = NULL;
	params.memory = BPS_MEMORY_CUDA;
	params.stream = NULL;
	params.all_ranks = 0;
	params.ordinal = 0;
	params.order = BPS_ORDER_CALLS;
	params.input_dtype = BPS_BFLOAT16;
	EXPECT(bps_submit(tensor, &params, &request) < 0);
	EXPECT(bps_client_take_ordinal(NULL, BPS_ORDER_PROGRAMS, &rows) < 0);
	EXPECT(bps_client_differed(NULL, BPS_ORDER_CALLS) == 0);
	EXPECT(bps_barrier(NULL, 0, &request) < 0);
	EXPECT(bps_request_poll(request) < 0);
	EXPECT(bps_request_wait(request, 0) < 0);
	EXPECT(bps_request_wait_stream(request, NULL, 0) < 0);
	EXPECT(bps_request_blocked(request, 1) < 0);
	EXPECT(bps_request_cancel(request) < 0);
	EXPECT(bps_request_rows(request, &rows) < 0);
	EXPECT(bps_request_contributions(request, &rows) < 0);
	EXPECT(bps_request_outcome(request, &outcome) < 0);
	EXPECT(!*bps_request_error(request));
	bps_request_free(request);
	bps_tensor_free(tensor);
}

static void use_constants(void)
{
	static const enum bps_dtype dtypes[] = { BPS_FLOAT64,  BPS_FLOAT32, BPS_FLOAT16,
						 BPS_BFLOAT16, BPS_INT64,   BPS_INT32,
						 BPS_INT16,    BPS_INT8,    BPS_UINT8,
						 BPS_BOOL };
	static const enum bps_operation operations[] = { BPS_PUSH_PULL,	     BPS_BROADCAST,
							 BPS_ALL_GATHER,     BPS_REDUCE_SCATTER,
							 BPS_ALL_TO_ALL,     BPS_BARRIER,
							 BPS_PUSH_PULL_ROWS, BPS_ACCUMULATE,
							 BPS_REFUSE };
	static const enum bps_reduction reductions[] = { BPS_SUM, BPS_AVERAGE, BPS_MIN, BPS_MAX };
	static const enum bps_memory_kind kinds[] = { BPS_MEMORY_HOST, BPS_MEMORY_CUDA };
	static const enum bps_gpu_reduce plans[] = { BPS_GPU_REDUCE_AUTO, BPS_GPU_REDUCE_NCCL,
						     BPS_GPU_REDUCE_SWITCH, BPS_GPU_REDUCE_HOST,
						     BPS_GPU_REDUCE_ROOTS };
	char version[64];
	size_t i;

	for (i = 0; i < sizeof(dtypes) / sizeof(dtypes[0]); i++)
		EXPECT((size_t)dtypes[i] == i + 1 && bps_dtype_size(dtypes[i]));
	for (i = 0; i < sizeof(operations) / sizeof(operations[0]); i++)
		EXPECT((size_t)operations[i] == i + 1);
	for (i = 0; i < sizeof(reductions) / sizeof(reductions[0]); i++)
		EXPECT((size_t)reductions[i] == i + 1);
	for (i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++)
		EXPECT((size_t)kinds[i] == i);
	for (i = 0; i < sizeof(plans) / sizeof(plans[0]); i++)
		EXPECT((size_t)plans[i] == i);
	EXPECT(BPS_FOREVER < 0 && BPS_VARIABLE == UINT64_MAX);
	sprintf(version, "%d.%d.%d", BPS_VERSION_MAJOR, BPS_VERSION_MINOR, BPS_VERSION_PATCH);
	EXPECT(!strcmp(version, bps_version()));
}

int main(void)
{
	use_client();
	use_memory();
	use_operations();
	use_constants();
	return 0;
}
