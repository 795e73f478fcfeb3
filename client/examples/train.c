/*
 * Trains a classifier (softmax regression) on Fisher's measurements of 150 irises. Each rank has its share of the rows;
 * gradients are summed over all ranks, so the model is the same on each, and the same as one process alone would get.
 *
 *	bpslaunch -np 4 bps-example-train iris.csv
 */
#include <bps.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define ROWS	 150
#define FEATURES 5 /* four measurements, and 1 for the bias */
#define CLASSES	 3
#define WEIGHTS	 (CLASSES * FEATURES) /* of class 0, of class 1, ... */
#define STEPS	 1000
#define RATE	 3.0f

struct row {
	float x[FEATURES];
	int class;
};

static void check(int r, const char *what)
{
	if (r < 0) {
		fprintf(stderr, "%s: %s\n", what, bps_error());
		exit(1);
	}
}

/* Four measurements and a class. */
static int read_row(FILE *file, struct row *row)
{
	float *x = row->x;
	int n = fscanf(file, "%f,%f,%f,%f,%d", &x[0], &x[1], &x[2], &x[3], &row->class);

	for (int k = 0; k < 4; k++)
		x[k] /= 8; /* no iris is longer */
	x[4] = 1;
	return n == 5 && row->class >= 0 && row->class < CLASSES;
}

static void load(const char *path, struct row *rows)
{
	FILE *file = fopen(path, "r");

	for (int i = 0; i < ROWS; i++) {
		if (!file || !read_row(file, &rows[i])) {
			fprintf(stderr, "%s, line %d: not x,x,x,x,class\n", path, i + 1);
			exit(1);
		}
	}
	fclose(file);
}

/* Probability of each class. */
static void forward(const float *weight, const struct row *row, float *p)
{
	float sum = 0;

	for (int c = 0; c < CLASSES; c++) {
		float z = 0;

		for (int k = 0; k < FEATURES; k++)
			z += weight[c * FEATURES + k] * row->x[k];
		sum += p[c] = expf(z);
	}
	for (int c = 0; c < CLASSES; c++)
		p[c] /= sum;
}

int main(int argc, char **argv)
{
	static struct row rows[ROWS];
	static float weight[WEIGHTS];
	struct bps_submit_params params = { .size = sizeof(params), .operation = BPS_PUSH_PULL };
	struct bps_client *client;
	struct bps_memory *memory;
	struct bps_tensor *tensor;
	int rank, size, right = 0;
	float *gradient, *loss, p[CLASSES];

	if (argc != 2) {
		fprintf(stderr, "usage: %s iris.csv\n", argv[0]);
		return 2;
	}
	load(argv[1], rows);
	check(bps_client_open(NULL, &client), "open");
	check(bps_client_join(client, NULL), "join");
	rank = bps_client_rank(client);
	size = bps_client_size(client);

	/* The gradient, and behind it the loss, in memory that the daemon can reach: it is summed where it lies. */
	check(bps_memory_alloc(client, (WEIGHTS + 1) * sizeof(float), &memory), "memory");
	check(bps_tensor_declare(client, "gradient", BPS_FLOAT32, WEIGHTS + 1, &tensor), "declare");
	params.input = params.output = gradient = bps_memory_data(memory);
	loss = &gradient[WEIGHTS];

	for (int step = 0; step < STEPS; step++) {
		struct bps_request *request;

		for (int i = 0; i < WEIGHTS; i++)
			gradient[i] = 0;
		*loss = 0;
		for (int i = rank; i < ROWS; i += size) {
			forward(weight, &rows[i], p);
			*loss -= logf(p[rows[i].class]);
			for (int c = 0; c < CLASSES; c++)
				for (int k = 0; k < FEATURES; k++)
					gradient[c * FEATURES + k] +=
						(p[c] - (c == rows[i].class)) * rows[i].x[k];
		}

		check(bps_submit(tensor, &params, &request), "submit");
		check(bps_request_wait(request, BPS_FOREVER), "wait");
		bps_request_free(request);

		for (int i = 0; i < WEIGHTS; i++)
			weight[i] -= RATE * gradient[i] / ROWS;
		if (rank == 0 && step % 200 == 199)
			printf("step %d: loss %.3f\n", step + 1, *loss / ROWS);
	}

	for (int i = 0; i < ROWS; i++) {
		forward(weight, &rows[i], p);
		right += p[rows[i].class] >= p[0] && p[rows[i].class] >= p[1] &&
			 p[rows[i].class] >= p[2];
	}
	printf("rank %d of %d: %d of %d are right\n", rank, size, right, ROWS);

	bps_tensor_free(tensor);
	bps_memory_free(memory);
	bps_client_close(client);
	return 0;
}
