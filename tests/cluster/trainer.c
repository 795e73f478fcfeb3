/*
 * A rank that does what its standard input says, one command a line, and answers each with one line: "ok [value]" or
 * "err ERRNO TEXT". The cluster tests drive many of them and so decide the order in which everything arrives. Data is
 * read from and written to files. Single-threaded; sizes are limited by what a test asks for.
 *
 *	open SOCKET TIMEOUT_MS
 *	join KEY=VALUE...			keys: fields of struct bps_join_params
 *	leave | close | rank
 *	child					of fork(), which does nothing as long as this one lives
 *	attend					from now on, call the library between commands too, when it has news
 *	tensor ID NAME DTYPE ELEMENTS		ELEMENTS -1: BPS_VARIABLE
 *	agreed ID TIMEOUT_MS			bps_tensor_wait()
 *	submit REQUEST TENSOR KEY=VALUE...	op red in out counts recv root priority timeout all shared inplace fill; at: the
 *						byte of the input where an output in place begins; push_pull_rows: width
 *						rows, a file of int64; from: the type of the input, if not the tensor's
 *	rows REQUEST FILE			writes the numbers of the result's rows; answers how many they are
 *	contributions REQUEST			bps_request_contributions()
 *	came REQUEST				bps_request_outcome(): membership, size, rank, how many came, how many wait
 *	regroup
 *	follow FOLLOWS IDLE			bps_client_follow()
 *	begun TIMEOUT_MS			bps_client_begun(): name, type, elements, round, operation, reduction; or all
 *	status					bps_client_status(): state, size, ranks here, rounds, who is waited for
 *	barrier REQUEST TIMEOUT_MS
 *	wait REQUEST TIMEOUT_MS | poll REQUEST | cancel REQUEST | free REQUEST
 *	result REQUEST FILE			writes the output
 *	large REQUEST TENSOR			push_pull in place of library memory filled with a pattern of bytes
 *	verify REQUEST FACTOR			whether each byte of the result is the pattern's, times FACTOR
 *	alloc BYTES				and free it again
 *	device ORDINAL				memory of `submit ... device=KIND` (enum device_kind) is there from now on, and
 *						results are read in the order of its stream
 *	stream REQUEST				bps_request_wait_stream(), by that stream
 *	notice					what the client has to tell, or -
 *	release					bps_cuda_release() of all
 */
#include "bps.h"
#include "device.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_IDS	    8192
#define MAX_COUNTS  256
#define SHARE_PIECE ((size_t)256 << 20)

struct operation {
	struct bps_request *request;
	struct bps_memory *in_memory, *out_memory; /* NULL: malloc, or of the device */
	struct device_memory in_device, out_device;
	void *input, *output;
	int in_place; /* output lies in input */
	size_t output_len;
	struct bps_memory *in_rows_memory, *out_rows_memory;
	int64_t *input_rows, *output_rows;
	size_t row_len;
};

static struct bps_client *client;
static int attending;
static struct bps_tensor *tensors[MAX_IDS];
static int dtypes[MAX_IDS];
static uint64_t elements[MAX_IDS];
static struct operation operations[MAX_IDS];

static void answer(int r, const char *value)
{
	if (r < 0)
		printf("err %d %s\n", -r, bps_error());
	else
		printf("ok %s\n", value);
	fflush(stdout);
}

static void do_status(void)
{
	struct bps_status status = { .size = sizeof(status) };
	int r = bps_client_status(client, &status);
	char text[256];

	snprintf(text, sizeof(text), "%s %u %u %llu %s", *status.state ? status.state : "none",
		 status.world_size, status.n_here, (unsigned long long)status.n_rounds,
		 status.waiting_for);
	answer(r, text);
}

static void do_begun(char **words)
{
	struct bps_begun begun = { .size = sizeof(begun) };
	int r = bps_client_begun(client, atoi(words[1]), &begun);
	char text[400] = "all";

	if (r == 1)
		snprintf(text, sizeof(text), "%s %d %lld %llu %d %d", begun.name, begun.dtype,
			 (long long)begun.elements, (unsigned long long)begun.round,
			 begun.operation, begun.reduction);
	answer(r, text);
}

static void answer_number(int r)
{
	char text[32];

	snprintf(text, sizeof(text), "%d", r);
	answer(r, text);
}

/* The value of KEY=VALUE among the words of a command, or NULL. */
static char *value_of(char **words, const char *key)
{
	size_t len = strlen(key);

	for (; *words; words++) {
		if (!strncmp(*words, key, len) && (*words)[len] == '=')
			return *words + len + 1;
	}
	return NULL;
}

static int64_t number_of(char **words, const char *key, int64_t fallback)
{
	char *value = value_of(words, key);

	return value ? strtoll(value, NULL, 0) : fallback;
}

static size_t counts_of(char **words, const char *key, uint64_t *counts)
{
	char *value = value_of(words, key), *save = NULL;
	size_t n = 0;

	for (char *word = value ? strtok_r(value, ",", &save) : NULL; word && n < MAX_COUNTS;
	     word = strtok_r(NULL, ",", &save))
		counts[n++] = strtoull(word, NULL, 0);
	return n;
}

static unsigned id_of(char **words, size_t at)
{
	unsigned id = (unsigned)strtoul(words[at] ? words[at] : "", NULL, 0);

	if (id >= MAX_IDS) {
		fprintf(stderr, "trainer: number %u is too large\n", id);
		exit(2);
	}
	return id;
}

static void do_open(char **words)
{
	struct bps_open_params params = {
		.size = sizeof(params),
		.socket = words[1],
		.timeout_ms = words[2] ? atoi(words[2]) : 0,
	};

	answer(bps_client_open(&params, &client), "");
}

static void do_join(char **words)
{
	char *secret = value_of(words, "secret");
	struct bps_join_params params = {
		.size = sizeof(params),
		.job = value_of(words, "job"),
		.secret = secret,
		.secret_len = secret ? strlen(secret) : 0,
		.rank = (uint32_t)number_of(words, "rank", 0),
		.world_size = (uint32_t)number_of(words, "world_size", 1),
		.local_rank = (uint32_t)number_of(words, "local_rank", 0),
		.local_size = (uint32_t)number_of(words, "local_size", 0),
		.node = (uint32_t)number_of(words, "node", 0),
		.n_nodes = (uint32_t)number_of(words, "n_nodes", 0),
		.timeout_ms = number_of(words, "timeout_ms", 0),
		.request_timeout_ms = number_of(words, "request_timeout_ms", 0),
		.min_servers = (uint32_t)number_of(words, "min_servers", 0),
		.part_bytes = (uint32_t)number_of(words, "part_bytes", 0),
		.force_distributed = (int)number_of(words, "force_distributed", 0),
		.gpu_reduce = (int)number_of(words, "gpu_reduce", 0),
		.gpu_roots = (uint64_t)number_of(words, "gpu_roots", 0),
		.quorum = (uint32_t)number_of(words, "quorum", 0),
		.quorum_timeout_ms = number_of(words, "quorum_timeout_ms", 0),
		.asynchronous = (int)number_of(words, "async", 0),
		.staleness = (uint32_t)number_of(words, "staleness", 0),
		.elastic = (int)number_of(words, "elastic", 0),
		.newcomer = (int)number_of(words, "newcomer", 0),
		.min_ranks = (uint32_t)number_of(words, "min_ranks", 0),
		.max_ranks = (uint32_t)number_of(words, "max_ranks", 0),
	};

	answer(bps_client_join(client, &params), "");
}

static void do_tensor(char **words)
{
	unsigned id = id_of(words, 1);

	dtypes[id] = atoi(words[3]);
	elements[id] = strtoull(words[4], NULL, 0);
	answer(bps_tensor_declare(client, words[2], dtypes[id], elements[id], &tensors[id]), "");
}

static void *read_file(const char *path, size_t *ret_len)
{
	FILE *file = fopen(path, "rb");
	struct stat st;
	void *data;

	if (!file || fstat(fileno(file), &st)) {
		perror(path);
		exit(2);
	}
	data = malloc((size_t)st.st_size + 1);
	if (!data || fread(data, 1, (size_t)st.st_size, file) != (size_t)st.st_size) {
		perror(path);
		exit(2);
	}
	fclose(file);
	*ret_len = (size_t)st.st_size;
	return data;
}

/* Memory of the library's or the heap's, as the test asks. */
static void *memory(size_t len, int shared, struct bps_memory **ret_memory)
{
	void *data;

	*ret_memory = NULL;
	if (shared) {
		if (bps_memory_alloc(client, len ? len : 1, ret_memory)) {
			fprintf(stderr, "trainer: %s\n", bps_error());
			exit(2);
		}
		return bps_memory_data(*ret_memory);
	}
	data = calloc(len + 64, 1);
	if (!data)
		exit(2);
	return data;
}

/* The same, or of kind on the device. */
static void *memory_of(size_t len, int shared, int kind, struct bps_memory **ret_memory,
		       struct device_memory *ret_device)
{
	if (!kind)
		return memory(len, shared, ret_memory);
	*ret_device = device_alloc((enum device_kind)kind, len);
	return ret_device->data;
}

static void operation_free(struct operation *op)
{
	bps_request_free(op->request);
	bps_memory_free(op->in_memory);
	if (!op->in_place) {
		bps_memory_free(op->out_memory);
		if (!op->out_memory && !op->out_device.kind)
			free(op->output);
	}
	if (!op->in_memory && !op->in_device.kind)
		free(op->input);
	device_free(&op->in_device);
	device_free(&op->out_device);
	bps_memory_free(op->in_rows_memory);
	bps_memory_free(op->out_rows_memory);
	if (!op->in_rows_memory)
		free(op->input_rows);
	if (!op->out_rows_memory)
		free(op->output_rows);
	memset(op, 0, sizeof(*op));
}

static void submit_rows(struct operation *op, char **words, struct bps_submit_params *params,
			size_t size, int shared)
{
	char *path = value_of(words, "rows");
	void *data;
	size_t len;

	params->width = (uint64_t)number_of(words, "width", 0);
	if (!path || !params->width)
		return;
	data = read_file(path, &len);
	op->input_rows = memory(len, shared, &op->in_rows_memory);
	memcpy(op->input_rows, data, len);
	free(data);
	op->output_rows = memory(params->output_count / params->width * sizeof(int64_t), shared,
				 &op->out_rows_memory);
	op->row_len = params->width * size;
	params->input_rows = op->input_rows;
	params->output_rows = op->output_rows;
}

static void do_submit(char **words)
{
	struct operation *op = &operations[id_of(words, 1)];
	unsigned tensor = id_of(words, 2);
	uint64_t counts[MAX_COUNTS], receive[MAX_COUNTS];
	size_t size = bps_dtype_size(dtypes[tensor]), len = 0;
	int from = (int)number_of(words, "from", dtypes[tensor]);
	int shared = (int)number_of(words, "shared", 0), kind = (int)number_of(words, "device", 0);
	char *path = value_of(words, "in");
	void *data = path ? read_file(path, &len) : NULL;
	struct bps_submit_params params = { .size = sizeof(params) };

	op->output_len = (size_t)number_of(words, "out", 0) * size;
	op->in_place = (int)number_of(words, "inplace", 0);
	op->input = memory_of(op->in_place && op->output_len > len ? op->output_len : len, shared,
			      kind, &op->in_memory, &op->in_device);
	if (data && kind)
		device_write(op->input, data, len);
	else if (data)
		memcpy(op->input, data, len);
	free(data);
	op->output = op->in_place ? (char *)op->input + number_of(words, "at", 0)
				  : memory_of(op->output_len, shared, kind, &op->out_memory,
					      &op->out_device);
	if (kind) {
		params.memory = BPS_MEMORY_CUDA;
		params.stream = device_stream();
	}
	params.operation = (int)number_of(words, "op", BPS_PUSH_PULL);
	params.reduction = (int)number_of(words, "red", 0);
	params.input = path ? op->input : NULL;
	params.output = op->output;
	params.input_dtype = (uint64_t)from;
	params.input_count = len / bps_dtype_size(from);
	params.output_count = op->output_len / size;
	params.root = (uint32_t)number_of(words, "root", 0);
	params.priority = (int32_t)number_of(words, "priority", 0);
	params.timeout_ms = number_of(words, "timeout", 0);
	params.all_ranks = (int)number_of(words, "all", 0);
	submit_rows(op, words, &params, size, shared);
	if (counts_of(words, "counts", counts))
		params.counts = counts;
	if (counts_of(words, "recv", receive))
		params.receive_counts = receive;
	answer(bps_submit(tensors[tensor], &params, &op->request), "");
	if (!op->request)
		operation_free(op);
}

static void do_wait(char **words)
{
	answer(bps_request_wait(operations[id_of(words, 1)].request, strtoll(words[2], NULL, 0)),
	       "");
}

static void do_result(char **words)
{
	struct operation *op = &operations[id_of(words, 1)];
	FILE *file = fopen(words[2], "wb");
	void *copy = NULL, *output = op->output;

	if (op->in_device.kind) {
		output = copy = malloc(op->output_len + 1);
		device_read(copy, op->output, op->output_len);
	}
	/* An operation that was refused has no output. */
	if (!file || (op->output_len && fwrite(output, op->output_len, 1, file) != 1) ||
	    fclose(file)) {
		perror(words[2]);
		exit(2);
	}
	free(copy);
	answer(0, "");
}

static void do_contributions(char **words)
{
	uint64_t n = 0;
	int r = bps_request_contributions(operations[id_of(words, 1)].request, &n);

	if (r)
		answer(r, "");
	else
		answer_number((long)n);
}

static void do_came(char **words)
{
	struct bps_outcome outcome = { .size = sizeof(outcome) };
	int r = bps_request_outcome(operations[id_of(words, 1)].request, &outcome);
	char text[64];

	snprintf(text, sizeof(text), "%u %u %u %u %u", outcome.membership, outcome.world_size,
		 outcome.rank, outcome.n_came, outcome.n_waiting);
	answer(r, text);
}

static void do_rows(char **words)
{
	struct operation *op = &operations[id_of(words, 1)];
	FILE *file = fopen(words[2], "wb");
	uint64_t n = 0;
	char text[32];
	int r = bps_request_rows(op->request, &n);
	/* After ENOSPC there are more than came. */
	size_t n_written = !r && n * op->row_len <= op->output_len ? n : 0;

	if (!file || fwrite(op->output_rows, sizeof(int64_t), n_written, file) != n_written ||
	    fclose(file)) {
		perror(words[2]);
		exit(2);
	}
	op->output_len = n_written * op->row_len;
	snprintf(text, sizeof(text), "%llu", (unsigned long long)n);
	answer(r, text);
}

/*
 * Bytes that repeat after a prime: a part that lands in the wrong place shows. Many periods at once, since one at a time takes
 * longer than all else where there are gigabytes.
 */
#define PATTERN_LEN ((size_t)251 * 256)

static void pattern(uint8_t block[PATTERN_LEN], uint8_t factor)
{
	for (size_t i = 0; i < PATTERN_LEN; i++)
		block[i] = (uint8_t)(i % 251 * factor);
}

/* Of the block that begins there. */
static size_t pattern_len(const struct operation *op, size_t at)
{
	return op->output_len - at < PATTERN_LEN ? op->output_len - at : PATTERN_LEN;
}

static void do_large(char **words)
{
	struct operation *op = &operations[id_of(words, 1)];
	unsigned tensor = id_of(words, 2);
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	uint8_t block[PATTERN_LEN];

	op->output_len = elements[tensor] * bps_dtype_size(dtypes[tensor]);
	op->input = memory(op->output_len, 1, &op->in_memory);
	pattern(block, 1);
	for (size_t at = 0; at < op->output_len; at += PATTERN_LEN)
		memcpy((uint8_t *)op->input + at, block, pattern_len(op, at));
	op->output = op->input;
	op->in_place = 1;
	params.input = op->input;
	params.output = op->input;
	answer(bps_submit(tensors[tensor], &params, &op->request), "");
}

static void do_verify(char **words)
{
	struct operation *op = &operations[id_of(words, 1)];
	uint8_t block[PATTERN_LEN];
	size_t at = 0;

	pattern(block, (uint8_t)atoi(words[2]));
	while (at < op->output_len &&
	       !memcmp((uint8_t *)op->output + at, block, pattern_len(op, at)))
		at += PATTERN_LEN;
	answer(0, at < op->output_len ? "different" : "same");
}

static void do_alloc(char **words)
{
	struct bps_memory *m = NULL;
	int r = bps_memory_alloc(client, strtoull(words[1], NULL, 0), &m);

	answer(r, "");
	bps_memory_free(m);
}

static void do_close(void)
{
	for (size_t i = 0; i < MAX_IDS; i++) {
		if (operations[i].input || operations[i].request)
			operation_free(&operations[i]);
		bps_tensor_free(tensors[i]);
		tensors[i] = NULL;
	}
	bps_client_close(client);
	client = NULL;
	answer(0, "");
}

static void do_child(void)
{
	pid_t pid = fork();

	if (pid) {
		answer(pid < 0 ? -errno : 0, "");
		return;
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (int fd = 0; fd < 3; fd++)
		close(fd);
	for (;;)
		pause();
}

/* Kept until the process ends. One file again and again: quotas count what is shared, and the machine has it once. */
static void do_share(unsigned long long len)
{
	size_t most = len < SHARE_PIECE ? (size_t)len : SHARE_PIECE, n;
	int fd = memfd_create("share", MFD_CLOEXEC | MFD_ALLOW_SEALING), r;

	r = fd < 0 || ftruncate(fd, (off_t)most) ? -errno : 0;
	for (; !r && len; len -= n) {
		struct bps_memory *memory;
		void *data;

		n = len < most ? (size_t)len : most;
		data = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		r = data == MAP_FAILED ? -errno : bps_memory_import(client, fd, data, n, &memory);
	}
	answer(r, "");
}

static void run(char **words)
{
	const char *verb = words[0];

	if (!strcmp(verb, "open"))
		do_open(words);
	else if (!strcmp(verb, "join"))
		do_join(words + 1);
	else if (!strcmp(verb, "leave"))
		answer(bps_client_leave(client), "");
	else if (!strcmp(verb, "close"))
		do_close();
	else if (!strcmp(verb, "child"))
		do_child();
	else if (!strcmp(verb, "attend")) {
		attending = 1;
		answer(0, "");
	} else if (!strcmp(verb, "rank"))
		answer_number(bps_client_rank(client));
	else if (!strcmp(verb, "tensor"))
		do_tensor(words);
	else if (!strcmp(verb, "agreed"))
		answer(bps_tensor_wait(tensors[id_of(words, 1)], atoi(words[2])), "");
	else if (!strcmp(verb, "submit"))
		do_submit(words);
	else if (!strcmp(verb, "barrier"))
		answer(bps_barrier(client, atoi(words[2]), &operations[id_of(words, 1)].request),
		       "");
	else if (!strcmp(verb, "wait"))
		do_wait(words);
	else if (!strcmp(verb, "poll"))
		answer_number(bps_request_poll(operations[id_of(words, 1)].request));
	else if (!strcmp(verb, "cancel"))
		answer(bps_request_cancel(operations[id_of(words, 1)].request), "");
	else if (!strcmp(verb, "free")) {
		operation_free(&operations[id_of(words, 1)]);
		answer(0, "");
	} else if (!strcmp(verb, "result"))
		do_result(words);
	else if (!strcmp(verb, "came"))
		do_came(words);
	else if (!strcmp(verb, "share"))
		do_share(strtoull(words[1], NULL, 0));
	else if (!strcmp(verb, "regroup"))
		answer(bps_client_regroup(client), "");
	else if (!strcmp(verb, "follow"))
		answer(bps_client_follow(client, atoi(words[1]), atoi(words[2])), "");
	else if (!strcmp(verb, "begun"))
		do_begun(words);
	else if (!strcmp(verb, "status"))
		do_status();
	else if (!strcmp(verb, "contributions"))
		do_contributions(words);
	else if (!strcmp(verb, "rows"))
		do_rows(words);
	else if (!strcmp(verb, "large"))
		do_large(words);
	else if (!strcmp(verb, "verify"))
		do_verify(words);
	else if (!strcmp(verb, "alloc"))
		do_alloc(words);
	else if (!strcmp(verb, "device")) {
		device_open(atoi(words[1]));
		answer(0, "");
	} else if (!strcmp(verb, "stream"))
		answer(bps_request_wait_stream(operations[id_of(words, 1)].request, device_stream(),
					       -1),
		       "");
	else if (!strcmp(verb, "notice")) {
		const char *notice = bps_client_notice(client);

		answer(0, notice ? notice : "-");
	} else if (!strcmp(verb, "release"))
		answer(bps_cuda_release(client, NULL, 0), "");
	else {
		fprintf(stderr, "trainer: %s: no such command\n", verb);
		exit(2);
	}
}

/* Until there is a command. Standard input has no buffer of its own, so that nothing waits unseen in it. */
static void attend(void)
{
	struct pollfd fds[2] = { { .fd = STDIN_FILENO, .events = POLLIN }, { .events = POLLIN } };

	while (attending && client) {
		fds[1].fd = bps_client_fd(client);
		if (poll(fds, 2, -1) < 0 || fds[0].revents)
			return;
		bps_client_dispatch(client);
	}
}

int main(void)
{
	char *line = NULL;
	size_t room = 0;

	setvbuf(stdin, NULL, _IONBF, 0);
	while (attend(), getline(&line, &room, stdin) > 0) {
		char *words[512] = { NULL }, *save = NULL;
		size_t n = 0;

		for (char *word = strtok_r(line, " \n", &save); word && n < 511;
		     word = strtok_r(NULL, " \n", &save))
			words[n++] = word;
		if (n)
			run(words);
	}
	free(line);
	return 0;
}
