/* The tables of gpu-rules: each ends with an empty name. */
#pragma once

#include "check.h"

extern const struct rule memory_rules[], flag_rules[], nccl_rules[], time_rules[];
