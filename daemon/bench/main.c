/* bps-bench: see bench.h. */
#include "bench/bench.h"

static const struct {
	const char *name, *help;
	int (*run)(int argc, char **argv);
} commands[] = {
	{ "op", "one operation over all ranks, for a list of sizes", bench_op },
	{ "ring", "the hop to the daemon and back", bench_ring },
	{ "sum", "the kernels of the sum, beside memcpy", bench_sum },
	{ "replay", "a training step of a real model, with waits in place of the GPU",
	  bench_replay },
};

static void print_help(void)
{
	printf("Usage: bps-bench COMMAND [OPTION]...\n"
	       "Measures what a trainer waits for.\n"
	       "\n"
	       "Commands:\n");
	for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
		printf("  %-7s %s\n", commands[i].name, commands[i].help);
	printf("\n"
	       "Ranks come from the environment (bpslaunch -np 4 bps-bench op), or from --ranks N, "
	       "which\n"
	       "starts N of them on this machine. Rank 0 prints.\n"
	       "\n"
	       "For op, ring and replay:\n"
	       "      --ranks=N            start N ranks here, on the daemon that is running\n"
	       "      --json=FILE          write the figures to FILE too; - is standard output\n"
	       "      --repeats=N          measure N times\n"
	       "      --warmup=N           and N times before, unmeasured\n"
	       "\n"
	       "op:\n"
	       "      --operation=NAME     push_pull (default), broadcast, all_gather, "
	       "reduce_scatter,\n"
	       "                           all_to_all, barrier\n"
	       "      --reduction=NAME     sum (default), average, min, max\n"
	       "      --dtype=NAME         float32 (default), float64, float16, bfloat16, int64, "
	       "...\n"
	       "      --sizes=LIST         bytes of a rank's input: 4K,1M or 1K:64M:4 (from, to, "
	       "factor)\n"
	       "      --tensors=N          so many tensors of that size at once\n"
	       "      --copied             memory of the rank's own: copied in and out\n"
	       "      --count              system calls, context switches, allocations, copies; as "
	       "root\n"
	       "\n"
	       "ring:\n"
	       "      --pause-us=N         so long does everybody sleep between two hops; 1000 if "
	       "not given\n"
	       "\n"
	       "replay:\n"
	       "      --model=NAME         %s\n"
	       "      --scale=X            multiplies all times of computing, as for a link X "
	       "times slower\n"
	       "      --shrink=N           divides all tensors, as for a link N times faster\n"
	       "      --forward-ms=X --backward-ms=X --update-ms=X\n"
	       "                           times of a step instead of the model's own\n"
	       "      --fifo               no priorities: in the order in which gradients are "
	       "born\n"
	       "      --barrier            the next forward pass begins when all gradients are "
	       "there\n"
	       "      --describe           prints the tensors and the times as JSON instead\n"
	       "\n"
	       "sum:\n"
	       "      --json=FILE --rounds=N --inputs=N --bytes=N --dtype=NAME --all-reductions\n"
	       "\n"
	       "  -h, --help\n"
	       "  -V, --version\n",
	       model_names);
}

int main(int argc, char **argv)
{
	const char *name = argc > 1 ? argv[1] : "";

	if (!strcmp(name, "-h") || !strcmp(name, "--help")) {
		print_help();
		return 0;
	}
	if (!strcmp(name, "-V") || !strcmp(name, "--version")) {
		puts("bps-bench " BPS_VERSION);
		return 0;
	}
	for (size_t i = 0; i < ARRAY_SIZE(commands); i++)
		if (!strcmp(name, commands[i].name))
			return commands[i].run(argc - 1, argv + 1);
	if (*name)
		bench_usage("there is no command \"%s\"", name);
	bench_usage("name a command: op, ring, sum or replay");
}
