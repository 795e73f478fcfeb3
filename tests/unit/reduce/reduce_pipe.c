/*
 * One reduction for a script: inputs one after the other on stdin, the output on stdout.
 *
 *	reduce_pipe KERNEL DTYPE REDUCTION N_INPUTS N_ELEMENTS DIVISOR SCALE ROUND_BEFORE_DIVISION
 *	reduce_pipe			prints the kernels this machine has
 *
 * DTYPE and REDUCTION are numbers of proto/types.h. Exit status 77 where there is no such kernel.
 */
#include "reduce/reduce.h"
#include <stdio.h>

static int print_kernels(void)
{
	static const char *const names[] = { "scalar",	    "avx2",	  "avx512",
					     "avx512_bf16", "avx512_256", "neon" };

	for (size_t i = 0; i < ARRAY_SIZE(names); i++)
		if (!reduce_kernel_select(names[i]))
			puts(names[i]);
	return 0;
}

int main(int argc, char **argv)
{
	_cleanup_(freep) const void **inputs = NULL;
	_cleanup_(freep) char *data = NULL;
	_cleanup_(freep) char *out = NULL;
	struct reduce_params params;
	size_t len;
	void *output;

	if (argc == 1)
		return print_kernels();
	if (argc != 9)
		return 2;
	if (reduce_kernel_select(argv[1]))
		return 77;
	params = (struct reduce_params){
		.dtype = (unsigned)strtoul(argv[2], NULL, 10),
		.reduction = (unsigned)strtoul(argv[3], NULL, 10),
		.n_inputs = strtoul(argv[4], NULL, 10),
		.n_elements = strtoul(argv[5], NULL, 10),
		.divisor = strtoull(argv[6], NULL, 10),
		.scale = (uint32_t)strtoul(argv[7], NULL, 10),
		.round_before_division = argv[8][0] == '1',
		.n_outputs = 1,
	};
	if (!reduce_supported(params.dtype, params.reduction) || !params.n_inputs)
		return 2;
	if (params.reduction == REDUCTION_AVERAGE && !params.divisor)
		return 2;
	len = params.n_elements * dtype_size(params.dtype);
	inputs = calloc(params.n_inputs, sizeof(*inputs));
	data = malloc(params.n_inputs * len + 1);
	out = malloc(len + 1);
	if (!inputs || !data || !out)
		return 1;
	if (fread(data, 1, params.n_inputs * len, stdin) != params.n_inputs * len)
		return 1;
	for (size_t i = 0; i < params.n_inputs; i++)
		inputs[i] = data + i * len;
	output = out;
	params.inputs = inputs;
	params.outputs = &output;
	reduce_run(&params);
	return fwrite(out, 1, len, stdout) == len && !fflush(stdout) ? 0 : 1;
}
