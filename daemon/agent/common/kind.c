/*
 * What kind of round it is, by the requests that it has: which sum, and whether memory of devices is
 * in it. Control thread; agent_round_sum() in the pool, too.
 */
#include "agent/round/device.h"
#include "reduce/reduce.h"

bool agent_round_concerns_device(const struct agent_round *round)
{
	for (uint32_t i = 0; i < round->job->layout.n_local; i++) {
		const struct agent_request *request = round->ranks[i].request;

		if (request && (request->input_device || request->output_device))
			return true;
	}
	return false;
}

struct reduce_params agent_round_sum(const struct agent_round *round)
{
	bool divides = round->reduction == REDUCTION_AVERAGE && !round->job->distributed;
	struct reduce_params params = {
		.dtype = round->tensor->dtype,
		.reduction = round->reduction,
	};

	if (divides) {
		params.divisor = round->n_in;
		params.scale =
			params.dtype == DTYPE_FLOAT16 ? reduce_scale(round->job->layout.n_most) : 1;
		params.round_before_division = true;
	} else if (!agent_round_takes_one(round)) {
		params.divisor = round->scale;
	} else if (round->reduction == REDUCTION_AVERAGE && params.dtype > DTYPE_BFLOAT16) {
		params.divisor = 1; /* a sum that is told if it wraps */
	} else if (round->reduction == REDUCTION_AVERAGE) {
		params.reduction = REDUCTION_SUM;
	}
	return params;
}
