/*
 * Communication under computation: gradients go out as backward makes them, last layer first, and the front layers,
 * which the next forward needs first, overtake the rest. Started as allreduce.c.
 */
#include <bps.h>
#include <stdio.h>
#include <stdlib.h>

#define LAYERS	 8
#define ELEMENTS 250000
#define STEPS	 10

static void check(int r, const char *what)
{
	if (r < 0) {
		fprintf(stderr, "%s: %s\n", what, bps_error());
		exit(1);
	}
}

static void backward(float *gradient, int layer)
{
	for (size_t i = 0; i < ELEMENTS; i++)
		gradient[i] = (float)layer;
}

int main(void)
{
	struct bps_submit_params params = { .size = sizeof(params), .reduction = BPS_AVERAGE };
	struct bps_client *client;
	struct bps_memory *memory[LAYERS];
	struct bps_tensor *tensor[LAYERS];
	struct bps_request *request[LAYERS];
	char name[32];

	check(bps_client_open(NULL, &client), "open");
	check(bps_client_join(client, NULL), "join");
	for (int i = 0; i < LAYERS; i++) {
		snprintf(name, sizeof(name), "layer.%d", i);
		check(bps_memory_alloc(client, ELEMENTS * sizeof(float), &memory[i]), "memory");
		check(bps_tensor_declare(client, name, BPS_FLOAT32, ELEMENTS, &tensor[i]), name);
	}

	params.operation = BPS_PUSH_PULL;
	for (int step = 0; step < STEPS; step++) {
		for (int i = LAYERS - 1; i >= 0; i--) {
			params.input = params.output = bps_memory_data(memory[i]);
			params.priority = -i;
			backward(params.output, i);
			check(bps_submit(tensor[i], &params, &request[i]), "submit");
		}
		for (int i = 0; i < LAYERS; i++) { /* forward of the next step, layer by layer */
			check(bps_request_wait(request[i], BPS_FOREVER), "wait");
			bps_request_free(request[i]);
		}
	}
	printf("rank %d: %d steps\n", bps_client_rank(client), STEPS);
	bps_client_close(client);
	return 0;
}
