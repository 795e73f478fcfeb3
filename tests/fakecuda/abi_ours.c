/*
 * The numbers that our headers give for CUDA, NCCL and NVML, to be compared with those of the real
 * headers (abi_*_real.c).
 */
#include "abi.h"

#include "daemon/gpu/nccl_abi.h"
#include "daemon/gpu/nvml_abi.h"

ABI_DEFINE(abi_cuda_ours, ABI_CUDA_FACTS)
ABI_DEFINE(abi_nccl_ours, ABI_NCCL_FACTS)
ABI_DEFINE_NCCL_MAGIC(abi_nccl_magic_ours)
ABI_DEFINE(abi_nvml_ours, ABI_NVML_FACTS)
