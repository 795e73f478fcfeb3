/*
 * The tensors of well-known models, made from their architecture, and the work of each in a
 * forward pass of one example (a multiplication and an addition for each weight and each place
 * that it is applied to). replay.c plays them.
 */
#include "bench/bench.h"

struct maker {
	struct model *model;
	size_t capacity;
};

static void add(struct maker *m, uint64_t elements, double work)
{
	struct model *model = m->model;

	if (model->n_tensors == m->capacity) {
		m->capacity = m->capacity ? 2 * m->capacity : 64;
		model->tensors = reallocarray(model->tensors, m->capacity, sizeof(*model->tensors));
		if (!model->tensors)
			bench_die("out of memory");
	}
	model->tensors[model->n_tensors++] = (struct model_tensor){ elements, work };
}

/* Applied at so many places; with or without a bias. */
static void linear(struct maker *m, uint64_t inputs, uint64_t outputs, uint64_t places, bool bias)
{
	add(m, inputs * outputs, 2.0 * (double)(inputs * outputs * places));
	if (bias)
		add(m, outputs, (double)(outputs * places));
}

/* side: of the square image that comes out. */
static void conv(struct maker *m, uint64_t kernel, uint64_t inputs, uint64_t outputs, uint64_t side,
		 bool bias)
{
	linear(m, kernel * kernel * inputs, outputs, side * side, bias);
}

/* Batch or layer normalization: a weight and a bias. */
static void norm(struct maker *m, uint64_t width, uint64_t places)
{
	add(m, width, 4.0 * (double)(width * places));
	add(m, width, 0);
}

/* Simonyan and Zisserman 2014, configuration D: 138.4 million parameters in 32 tensors. */
static void vgg16(struct maker *m)
{
	static const struct {
		uint64_t width, n, side;
	} stages[] = {
		{ 64, 2, 224 }, { 128, 2, 112 }, { 256, 3, 56 }, { 512, 3, 28 }, { 512, 3, 14 }
	};
	uint64_t inputs = 3;

	for (size_t i = 0; i < ARRAY_SIZE(stages); i++)
		for (uint64_t j = 0; j < stages[i].n; j++) {
			conv(m, 3, inputs, stages[i].width, stages[i].side, true);
			inputs = stages[i].width;
		}
	linear(m, 512ull * 7 * 7, 4096, 1, true);
	linear(m, 4096, 4096, 1, true);
	linear(m, 4096, 1000, 1, true);
}

/* He et al. 2015: 25.6 million parameters in 161 tensors. */
static void resnet50(struct maker *m)
{
	static const uint64_t blocks[] = { 3, 4, 6, 3 };
	uint64_t inputs = 64;

	conv(m, 7, 3, 64, 112, false);
	norm(m, 64, 112ull * 112);
	for (uint64_t stage = 0; stage < ARRAY_SIZE(blocks); stage++) {
		uint64_t width = 64ull << stage, side = 56ull >> stage;

		for (uint64_t block = 0; block < blocks[stage]; block++) {
			uint64_t before = stage && !block ? 2 * side : side;

			conv(m, 1, inputs, width, before, false);
			norm(m, width, before * before);
			conv(m, 3, width, width, side, false);
			norm(m, width, side * side);
			conv(m, 1, width, 4 * width, side, false);
			norm(m, 4 * width, side * side);
			if (!block) {
				conv(m, 1, inputs, 4 * width, side, false);
				norm(m, 4 * width, side * side);
			}
			inputs = 4 * width;
		}
	}
	linear(m, 2048, 1000, 1, true);
}

/* Devlin et al. 2018: 336 million parameters in 398 tensors, with the heads of pre-training. */
static void bert_large(struct maker *m)
{
	enum { WIDTH = 1024, LAYERS = 24, WORDS = 30522, PLACES = 128 };

	add(m, (uint64_t)WORDS * WIDTH, 0);
	add(m, 512ull * WIDTH, 0);
	add(m, 2ull * WIDTH, 0);
	norm(m, WIDTH, PLACES);
	for (unsigned i = 0; i < LAYERS; i++) {
		for (unsigned j = 0; j < 4; j++)
			linear(m, WIDTH, WIDTH, PLACES, true);
		norm(m, WIDTH, PLACES);
		linear(m, WIDTH, 4 * WIDTH, PLACES, true);
		linear(m, 4 * WIDTH, WIDTH, PLACES, true);
		norm(m, WIDTH, PLACES);
	}
	linear(m, WIDTH, WIDTH, 1, true);
	linear(m, WIDTH, WIDTH, PLACES, true);
	norm(m, WIDTH, PLACES);
	add(m, WORDS,
	    2.0 * WORDS * WIDTH * PLACES); /* output: shares its weight with the first tensor */
	linear(m, WIDTH, 2, 1, true);
}

/* Radford et al. 2019, the smallest: 124 million parameters in 148 tensors. */
static void gpt2(struct maker *m)
{
	enum { WIDTH = 768, LAYERS = 12, WORDS = 50257, PLACES = 1024 };

	add(m, (uint64_t)WORDS * WIDTH, 0);
	add(m, (uint64_t)PLACES * WIDTH, 0);
	for (unsigned i = 0; i < LAYERS; i++) {
		norm(m, WIDTH, PLACES);
		linear(m, WIDTH, 3 * WIDTH, PLACES, true);
		linear(m, WIDTH, WIDTH, PLACES, true);
		norm(m, WIDTH, PLACES);
		linear(m, WIDTH, 4 * WIDTH, PLACES, true);
		linear(m, 4 * WIDTH, WIDTH, PLACES, true);
	}
	norm(m, WIDTH, PLACES);
	m->model->tensors[m->model->n_tensors - 1].work = 2.0 * WORDS * WIDTH * PLACES;
}

/* 50 layers alike: what the theory of overlapping is about. 25 million parameters. */
static void uniform(struct maker *m)
{
	for (unsigned i = 0; i < 50; i++)
		add(m, 500000, 1);
}

/*
 * Times of one V100, rounded: about 225 images/s of VGG16 and 370 of ResNet-50 (tf_cnn_benchmarks,
 * float32, batch 64), 55 sequences of 128 tokens of BERT-large (mixed precision, batch 32), 14 of
 * 1024 tokens of GPT-2 (mixed precision, batch 8). The backward pass is taken for twice the forward
 * one. What counts for communication is their ratio to the link's speed.
 */
static const struct {
	struct model model;
	void (*make)(struct maker *m);
} models[] = {
	{ { "vgg16", 92, 184, 8, "V100, float32, batch 64" }, vgg16 },
	{ { "resnet50", 57, 113, 3, "V100, float32, batch 64" }, resnet50 },
	{ { "bert-large", 188, 376, 18, "V100, mixed precision, batch 32" }, bert_large },
	{ { "gpt2", 188, 376, 7, "V100, mixed precision, batch 8" }, gpt2 },
	{ { "uniform", 40, 80, 0, "no machine" }, uniform },
};

const char model_names[] = "vgg16, resnet50, bert-large, gpt2 or uniform";

bool model_make(const char *name, struct model *ret_model)
{
	for (size_t i = 0; i < ARRAY_SIZE(models); i++) {
		struct maker maker = { .model = ret_model };

		if (strcmp(models[i].model.name, name))
			continue;
		*ret_model = models[i].model;
		models[i].make(&maker);
		return true;
	}
	return false;
}
