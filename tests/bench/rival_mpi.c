/*
 * Ranks of an MPI: MPI_Allreduce of float32 in place, as many bytes and as often as a line of rank 0's stdin says
 * ("BYTES REPEATS"). Says "ready" first, then for each line the nanoseconds of each repeat, by the slowest rank. Compiled
 * by whoever measures, with the mpicc of the MPI that is to be measured.
 */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec * 1e9 + (double)ts.tv_nsec;
}

/* What rank 0 was told. A rank that waits in the library would spin, and slow down what is measured meanwhile. */
static void await_order(long *order)
{
	const struct timespec nap = { .tv_nsec = 5000000 };
	MPI_Request request;
	int done = 0;

	MPI_Ibcast(order, 2, MPI_LONG, 0, MPI_COMM_WORLD, &request);
	for (;;) {
		MPI_Test(&request, &done, MPI_STATUS_IGNORE);
		if (done)
			return;
		nanosleep(&nap, NULL);
	}
}

int main(int argc, char **argv)
{
	long order[2] = { 0, 0 }, target = 0;
	float *data = NULL;
	int rank;

	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	if (!rank) {
		puts("ready");
		fflush(stdout);
	}
	for (;;) {
		if (!rank && scanf("%ld %ld", &order[0], &order[1]) != 2)
			order[0] = order[1] = 0;
		await_order(order);
		if (!order[1])
			break;
		if (order[0] != target) {
			free(data);
			target = order[0];
			data = calloc((size_t)target / sizeof(float), sizeof(float));
			if (!data)
				MPI_Abort(MPI_COMM_WORLD, 1);
		}
		for (long i = 0; i < order[1]; i++) {
			double began, took, slowest;

			MPI_Barrier(MPI_COMM_WORLD);
			began = now_ns();
			MPI_Allreduce(MPI_IN_PLACE, data, (int)(target / (long)sizeof(float)),
				      MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
			took = now_ns() - began;
			MPI_Reduce(&took, &slowest, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
			if (!rank)
				printf("%s%.0f", i ? " " : "", slowest);
		}
		if (!rank) {
			putchar('\n');
			fflush(stdout);
		}
	}
	free(data);
	MPI_Finalize();
	return 0;
}
