/*
 * Communication under computation: gradients go out as the backward pass makes them, last layer first, and the next
 * forward pass waits for each layer just before it needs it. Front layers are needed first, so they are more urgent and
 * overtake the rest. For comparison, the same steps with each gradient waited for where it is made.
 *
 *	bpslaunch -np 2 bps-example-overlap
 */
#include <bps.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define LAYERS	 8
#define ELEMENTS 250000
#define STEPS	 10
#define PASSES	 20 /* over a layer's elements: the work of a real layer */

struct layer {
	struct bps_memory *memory;
	struct bps_tensor *tensor;
	struct bps_request *request;
	float *gradient;
};

static void check(int r, const char *what)
{
	if (r < 0) {
		fprintf(stderr, "%s: %s\n", what, bps_error());
		exit(1);
	}
}

static double now(void)
{
	struct timespec t;

	timespec_get(&t, TIME_UTC);
	return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Stands for what a layer computes, in either direction. */
static void compute(float *values)
{
	for (int pass = 0; pass < PASSES; pass++)
		for (size_t i = 0; i < ELEMENTS; i++)
			values[i] = values[i] * 0.5f + 1;
}

static void await(struct layer *layer)
{
	if (!layer->request)
		return;
	check(bps_request_wait(layer->request, BPS_FOREVER), "wait");
	bps_request_free(layer->request);
	layer->request = NULL;
}

static double train(struct layer *layers, int overlap)
{
	static float activations[ELEMENTS];
	double began = now();

	for (int step = 0; step < STEPS; step++) {
		for (int i = 0; i < LAYERS; i++) { /* forward */
			await(&layers[i]);
			compute(activations);
		}
		for (int i = LAYERS - 1; i >= 0; i--) { /* backward */
			struct bps_submit_params params = {
				.size = sizeof(params),
				.operation = BPS_PUSH_PULL,
				.reduction = BPS_AVERAGE,
				.input = layers[i].gradient,
				.output = layers[i].gradient,
				.priority = -i,
			};

			compute(layers[i].gradient);
			check(bps_submit(layers[i].tensor, &params, &layers[i].request), "submit");
			if (!overlap)
				await(&layers[i]);
		}
	}
	for (int i = 0; i < LAYERS; i++)
		await(&layers[i]);
	return (now() - began) / STEPS;
}

int main(void)
{
	struct layer layers[LAYERS] = { 0 };
	struct bps_client *client;
	char name[32];
	double one_by_one, overlapped;

	check(bps_client_open(NULL, &client), "open");
	check(bps_client_join(client, NULL), "join");
	for (int i = 0; i < LAYERS; i++) {
		snprintf(name, sizeof(name), "layer.%d", i);
		check(bps_memory_alloc(client, ELEMENTS * sizeof(float), &layers[i].memory),
		      "memory");
		check(bps_tensor_declare(client, name, BPS_FLOAT32, ELEMENTS, &layers[i].tensor),
		      name);
		layers[i].gradient = bps_memory_data(layers[i].memory);
	}

	one_by_one = train(layers, 0);
	overlapped = train(layers, 1);
	printf("rank %d: a step takes %.1f ms one by one, %.1f ms overlapped\n",
	       bps_client_rank(client), 1e3 * one_by_one, 1e3 * overlapped);

	for (int i = 0; i < LAYERS; i++) {
		bps_tensor_free(layers[i].tensor);
		bps_memory_free(layers[i].memory);
	}
	bps_client_close(client);
	return 0;
}
