/*
 * A rank that names tensors anew in each step, and checks each sum bit for bit. Which rank of which job it is the environment
 * says. It says "joined" once it has, and "ok" and its steps at its end.
 *
 *	names STEPS CYCLE OTHER KEEPER PAUSE_US
 *
 * In step s it names "loss.<s % CYCLE>", with OTHER 1 of another shape each time round; "weights", whose handle it has always; and, once in
 * a while, one of "old.0" to "old.3", of which only rank KEEPER has a handle in between. Where a name was forgotten while its
 * daemon began anew, it names it anew, as bps_tensor_wait() says. PAUSE_US: between steps.
 */
#include "bps.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ELEMENTS 3000
#define OLD	 4
#define OLD_EACH 40

static struct bps_client *client;
static unsigned rank, size, keeper, n_anew;
static struct bps_tensor *kept[OLD];

static void check(int r, const char *what)
{
	if (r >= 0)
		return;
	fprintf(stderr, "names: %s: %s\n", what, bps_error());
	exit(1);
}

/* Whole numbers, all sums of which float32 has. */
static float value(unsigned of, unsigned step, unsigned i)
{
	return (float)((of + 1) * 1000 + step % 1000 + i % 777);
}

static struct bps_tensor *declare(const char *name, unsigned elements)
{
	for (;;) {
		struct bps_tensor *tensor;
		int r;

		check(bps_tensor_declare(client, name, BPS_FLOAT32, elements, &tensor), name);
		r = bps_tensor_wait(tensor, BPS_FOREVER);
		if (r != -ESTALE) {
			check(r, name);
			return tensor;
		}
		bps_tensor_free(tensor);
		n_anew++;
	}
}

static void reduce(struct bps_tensor *tensor, const char *name, unsigned elements, unsigned step)
{
	static float input[ELEMENTS], output[ELEMENTS];
	struct bps_submit_params params = {
		.size = sizeof(params),
		.operation = BPS_PUSH_PULL,
		.reduction = BPS_SUM,
		.input = input,
		.input_count = elements,
		.output = output,
		.output_count = elements,
	};
	struct bps_request *request;

	for (unsigned i = 0; i < elements; i++)
		input[i] = value(rank, step, i);
	check(bps_submit(tensor, &params, &request), name);
	check(bps_request_wait(request, BPS_FOREVER), name);
	bps_request_free(request);
	for (unsigned i = 0; i < elements; i++) {
		float sum = 0;

		for (unsigned of = 0; of < size; of++)
			sum += value(of, step, i);
		if (memcmp(&sum, &output[i], sizeof(sum)) != 0) {
			fprintf(stderr, "names: step %u: %s: element %u is %f, not %f\n", step,
				name, i, (double)output[i], (double)sum);
			exit(1);
		}
	}
}

static void use(const char *name, unsigned elements, unsigned step)
{
	struct bps_tensor *tensor = declare(name, elements);

	reduce(tensor, name, elements, step);
	bps_tensor_free(tensor);
}

static void use_old(unsigned step)
{
	unsigned number = step / OLD_EACH % OLD;
	char name[32];

	snprintf(name, sizeof(name), "old.%u", number);
	use(name, 10 + number, step);
}

int main(int argc, char **argv)
{
	struct bps_open_params open_params = { .size = sizeof(open_params) };
	struct bps_join_params join = { .size = sizeof(join) };
	unsigned steps, cycle, other, pause_us;
	struct bps_tensor *weights;

	if (argc != 6)
		return 2;
	steps = (unsigned)atoi(argv[1]);
	cycle = (unsigned)atoi(argv[2]);
	other = (unsigned)atoi(argv[3]);
	keeper = (unsigned)atoi(argv[4]);
	pause_us = (unsigned)atoi(argv[5]);
	check(bps_client_open(&open_params, &client), "open");
	check(bps_join_params_from_environment(&join), "environment");
	check(bps_client_join(client, &join), "join");
	printf("joined\n");
	fflush(stdout);
	rank = (unsigned)bps_client_rank(client);
	size = (unsigned)bps_client_size(client);
	weights = declare("weights", 1500);
	for (unsigned i = 0; i < OLD && rank == keeper; i++) {
		char name[32];

		snprintf(name, sizeof(name), "old.%u", i);
		check(bps_tensor_declare(client, name, BPS_FLOAT32, 10 + i, &kept[i]), name);
	}
	for (unsigned step = 0; step < steps; step++) {
		char name[32];

		snprintf(name, sizeof(name), "loss.%u", step % cycle);
		use(name, 1 + (step / cycle * other * 700 + step % cycle) % ELEMENTS, step);
		reduce(weights, "weights", 1500, step);
		if (step % OLD_EACH == 0)
			use_old(step);
		if (pause_us)
			usleep(pause_us);
	}
	printf("ok %u %u\n", steps, n_anew);
	fflush(stdout);
	bps_tensor_free(weights);
	for (unsigned i = 0; i < OLD; i++)
		bps_tensor_free(kept[i]);
	check(bps_client_leave(client), "leave");
	bps_client_close(client);
	return 0;
}
