/*
 * The smallest trainer: sums one vector over all ranks of the job that its launcher describes (bpslaunch, torchrun,
 * mpirun, srun; alone it is a job of one rank).
 *
 *	cc allreduce.c $(pkg-config --cflags --libs bps) && bpslaunch -n 4 ./a.out
 */
#include <bps.h>
#include <stdio.h>
#include <stdlib.h>

#define ELEMENTS 1000000

static void check(int r, const char *what)
{
	if (r < 0) {
		fprintf(stderr, "%s: %s\n", what, bps_error());
		exit(1);
	}
}

int main(void)
{
	struct bps_submit_params params = { .size = sizeof(params) };
	struct bps_client *client;
	struct bps_memory *memory;
	struct bps_tensor *tensor;
	struct bps_request *request;
	float *gradient;

	check(bps_client_open(NULL, &client), "open");
	check(bps_client_join(client, NULL), "join");
	check(bps_memory_alloc(client, ELEMENTS * sizeof(float), &memory), "memory");
	check(bps_tensor_declare(client, "gradient", BPS_FLOAT32, ELEMENTS, &tensor), "declare");

	gradient = bps_memory_data(memory);
	for (size_t i = 0; i < ELEMENTS; i++)
		gradient[i] = (float)bps_client_rank(client);

	params.operation = BPS_PUSH_PULL;
	params.reduction = BPS_SUM;
	params.input = params.output = gradient;
	check(bps_submit(tensor, &params, &request), "submit");
	check(bps_request_wait(request, BPS_FOREVER), "wait");
	printf("rank %d of %d: every element is %g\n", bps_client_rank(client),
	       bps_client_size(client), gradient[0]);

	bps_request_free(request);
	bps_tensor_free(tensor);
	bps_client_close(client);
	bps_memory_free(memory);
	return 0;
}
