/*
 * A rank of an elastic job, while ranks and nodes die around it and others come (scripts/chaos --elastic). What it gives to a
 * round is made of the last round's result, and says who it is: a result shows whose contributions are in it.
 *
 *	chaos_elastic SOCKET IDENTITY LOG STOP
 *
 * The job comes from BPS_* (BPS_NEWCOMER: it asks to be let in). IDENTITY is this process's alone, below SLOTS. LOG gets:
 *
 *	begin RUN ROUND RANK SIZE NODE		in the job, or regrouped; RANK and SIZE as they were at that moment
 *	result ROUND TENSOR HASH WHO MEMBERSHIP SIZE RANK CAME NANOSECONDS	WHO: identities with commas between
 *	failed ROUND ERRNO WORDS		the round is to be done again, from where it began
 *	done ROUND				all its results have come, and all ranks know that
 *	dropped WORDS, left, end		the last line
 *
 * Ends after the round in which rank 0 has seen that the file STOP exists. SIGUSR1: it leaves after the round. Exits 0; on an
 * error that no elastic job should see it says it and exits 1.
 */
#include "chaos.h"
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SLOTS 1024 /* the first elements of each tensor: 1 in one's own */

static const struct {
	const char *name, *state;
	int dtype, reduction;
	size_t n;
	int flags;
} kinds[] = {
	{ "weights", "weights.state", BPS_FLOAT32, BPS_AVERAGE, SLOTS + 40000, SHARED | IN_PLACE },
	{ "bias", "bias.state", BPS_FLOAT32, BPS_SUM, SLOTS + 301, IN_PLACE },
	{ "counts", "counts.state", BPS_INT32, BPS_SUM, SLOTS + 20000, SHARED },
};
#define N_KINDS (sizeof(kinds) / sizeof(*kinds))

static struct {
	struct bps_tensor *tensor, *state_tensor;
	void *input, *output;
	void *state; /* what the next round is made of: the results of the last that is done */
} tensors[N_KINDS];

static struct {
	int64_t run, round;
} progress = { -1, 0 };

static struct bps_client *client;
static struct bps_tensor *progress_tensor, *stop_tensor;
static int32_t stop_input, stop_output;
static unsigned long identity;
static int begin_rank, begin_size; /* when ranks were last numbered */
static const char *stop_path;
static FILE *log_file;
static volatile sig_atomic_t leaving;

static void on_leave(int number)
{
	(void)number;
	leaving = 1;
}

static void say(const char *line)
{
	fprintf(log_file, "%s\n", line);
	fflush(log_file);
}

/* An error of a call, or of a request: who was dropped goes, what else no elastic job should see ends the run. */
static void check(int r, const char *what)
{
	if (r >= 0)
		return;
	if (r == -ENOTCONN) /* the job is over for this rank: this says why */
		r = bps_client_regroup(client) ?: -EPROTO;
	if (r == -ESTALE) {
		fprintf(log_file, "dropped %s\n", bps_error());
		fclose(log_file);
		exit(0);
	}
	fprintf(stderr, "chaos_elastic: %lu: %s: %s\n", identity, what, bps_error());
	exit(1);
}

static void fill(unsigned t)
{
	uint32_t *words = tensors[t].input;
	const float one = 1;

	give(kinds[t].dtype, words, tensors[t].state, kinds[t].n, (uint32_t)identity,
	     (uint32_t)progress.round, t);
	memset(words, 0, SLOTS * sizeof(*words));
	words[identity] = 1;
	if (kinds[t].dtype == BPS_FLOAT32)
		memcpy(&words[identity], &one, sizeof(one));
}

static size_t len_of(unsigned t)
{
	return kinds[t].n * bps_dtype_size(kinds[t].dtype);
}

static void *given(unsigned t, int flags)
{
	struct bps_memory *kept; /* until the process ends */
	void *data = memory(client, len_of(t), flags, &kept);

	check(data ? 0 : -ENOMEM, "memory");
	return data;
}

static void declare(const char *name, int dtype, size_t n, struct bps_tensor **ret_tensor)
{
	check(bps_tensor_declare(client, name, dtype, n, ret_tensor), name);
}

static void prepare(void)
{
	for (unsigned t = 0; t < N_KINDS; t++) {
		declare(kinds[t].name, kinds[t].dtype, kinds[t].n, &tensors[t].tensor);
		declare(kinds[t].state, kinds[t].dtype, kinds[t].n, &tensors[t].state_tensor);
		tensors[t].input = given(t, kinds[t].flags);
		tensors[t].output =
			kinds[t].flags & IN_PLACE ? tensors[t].input : given(t, kinds[t].flags);
		tensors[t].state = given(t, 0);
	}
	declare("progress", BPS_INT64, 2, &progress_tensor);
	declare("stop", BPS_INT32, 1, &stop_tensor);
}

static struct bps_request *submit(struct bps_tensor *tensor, int operation, int reduction,
				  const void *input, void *output)
{
	struct bps_submit_params params = { .size = sizeof(params),
					    .operation = operation,
					    .reduction = reduction,
					    .input = input,
					    .output = output };
	struct bps_request *request;

	check(bps_submit(tensor, &params, &request), "submit");
	return request;
}

/*
 * Waits for all, in whatever way they end, since nothing may be under way when ranks regroup. 0, or how the first that failed
 * did, and says so.
 */
static int finish(struct bps_request **requests, unsigned n, struct bps_outcome *outcomes)
{
	int failed = 0;

	for (unsigned i = 0; i < n; i++) {
		if (failed)
			(void)bps_request_cancel(requests[i]);
		int r = bps_request_wait(requests[i], BPS_FOREVER);

		if (r && !failed) {
			failed = r;
			if (r != -EREMCHG && r != -ECANCELED)
				check(r, "request");
			fprintf(log_file, "failed %lld %d %s\n", (long long)progress.round, -r,
				bps_request_error(requests[i]));
		}
		if (outcomes) {
			outcomes[i].size = sizeof(*outcomes);
			check(bps_request_outcome(requests[i], &outcomes[i]), "outcome");
		}
		bps_request_free(requests[i]);
	}
	return failed;
}

/* All have what rank 0 has, and begin the next run. Fails if a rank was lost meanwhile. */
static int begin(void)
{
	struct bps_request *requests[1 + N_KINDS];
	bool root = bps_client_rank(client) == 0;

	progress.run++;
	requests[0] = submit(progress_tensor, BPS_BROADCAST, 0, root ? &progress : NULL, &progress);
	for (unsigned t = 0; t < N_KINDS; t++)
		requests[1 + t] = submit(tensors[t].state_tensor, BPS_BROADCAST, 0,
					 root ? tensors[t].state : NULL, tensors[t].state);
	int r = finish(requests, 1 + N_KINDS, NULL);

	if (r)
		return r;
	fprintf(log_file, "begin %lld %lld %d %d %d\n", (long long)progress.run,
		(long long)progress.round, begin_rank, begin_size, bps_client_node(client));
	fflush(log_file);
	return 0;
}

static void log_result(unsigned t, const struct bps_outcome *outcome)
{
	struct timespec now;
	char comma = ' ';

	clock_gettime(CLOCK_MONOTONIC, &now);
	fprintf(log_file, "result %lld %s %016llx", (long long)progress.round, kinds[t].name,
		(unsigned long long)digest(tensors[t].output, kinds[t].n));
	for (unsigned i = 0; i < SLOTS; i++) {
		if (((uint32_t *)tensors[t].output)[i]) {
			fprintf(log_file, "%c%u", comma, i);
			comma = ',';
		}
	}
	fprintf(log_file, " %u %u %u %u %lld%09ld\n", outcome->membership, outcome->world_size,
		outcome->rank, outcome->n_came, (long long)now.tv_sec, now.tv_nsec);
}

/* 0: goes on. 1: ranks are to regroup. 2: this was the last. */
static int train_round(void)
{
	struct bps_request *requests[N_KINDS + 1];
	struct bps_outcome outcomes[N_KINDS + 1];
	struct bps_outcome at_end[1];

	for (unsigned t = 0; t < N_KINDS; t++)
		fill(t);
	stop_input = !bps_client_rank(client) && !access(stop_path, F_OK);
	for (unsigned t = 0; t < N_KINDS; t++)
		requests[t] = submit(tensors[t].tensor, BPS_PUSH_PULL, kinds[t].reduction,
				     tensors[t].input, tensors[t].output);
	requests[N_KINDS] = submit(stop_tensor, BPS_PUSH_PULL, BPS_MAX, &stop_input, &stop_output);
	if (finish(requests, N_KINDS + 1, outcomes))
		return 1;
	for (unsigned t = 0; t < N_KINDS; t++)
		log_result(t, &outcomes[t]);
	fflush(log_file);
	check(bps_barrier(client, 0, requests), "barrier");
	if (finish(requests, 1, at_end))
		return 1;
	for (unsigned t = 0; t < N_KINDS; t++)
		memcpy(tensors[t].state, tensors[t].output, len_of(t));
	fprintf(log_file, "done %lld\n", (long long)progress.round++);
	fflush(log_file);
	if (stop_output)
		return 2;
	return at_end->n_waiting || at_end->world_size != (uint32_t)begin_size;
}

static void train(void)
{
	const struct timespec pause = { .tv_nsec = 10000000 }; /* the work between two rounds */

	for (;;) {
		begin_rank = bps_client_rank(client);
		begin_size = bps_client_size(client);
		int r = begin();

		while (!r) {
			r = train_round();
			if (r == 2)
				return say("end");
			if (leaving) {
				check(bps_client_leave(client), "leave");
				return say("left");
			}
			nanosleep(&pause, NULL);
		}
		check(bps_client_regroup(client), "regroup");
	}
}

int main(int argc, char **argv)
{
	struct bps_open_params open = { .size = sizeof(open),
					.timeout_ms = 600000,
					.restart_timeout_ms = 600000 };
	struct bps_join_params join = { .size = sizeof(join) };

	if (argc != 5) {
		fprintf(stderr, "chaos_elastic: see its source for its arguments\n");
		return 2;
	}
	signal(SIGUSR1, on_leave);
	open.socket = argv[1];
	identity = strtoul(argv[2], NULL, 10);
	stop_path = argv[4];
	log_file = fopen(argv[3], "w");
	if (!log_file || identity >= SLOTS) {
		perror(argv[3]);
		return 1;
	}
	check(bps_client_open(&open, &client), "open");
	check(bps_join_params_from_environment(&join), "environment");
	check(bps_client_join(client, &join), "join");
	prepare();
	train();
	bps_client_close(client);
	return fclose(log_file) ? 1 : 0;
}
