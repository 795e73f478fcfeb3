/* The program gpu-rules: which tables of rules it runs. */
#include "rules.h"

static const struct rule *const rules[] = { memory_rules, flag_rules, nccl_rules, NULL };
static const struct rule *const times[] = { time_rules, NULL };

const struct check_program check_program = { "gpu-rules", rules, times };
