/* Our hand-written headers against NVIDIA's, each where it is installed. */
#include "abi.h"
#include "lib/test.h"

static _unused_ void compare(const struct abi_facts *ours, const struct abi_facts *real)
{
	ASSERT_EQ(ours->n, real->n);
	ASSERT_INT(ours->n, >, 10);
	for (size_t i = 0; i < ours->n; i++) {
		ASSERT_STR(ours->list[i].what, real->list[i].what);
		if (ours->list[i].value != real->list[i].value)
			test_fail(__FILE__, __LINE__, "%s is %lld, not %lld", ours->list[i].what,
				  real->list[i].value, ours->list[i].value);
	}
}

TEST(cuda)
{
#ifdef ABI_HAS_CUDA
	compare(&abi_cuda_ours, &abi_cuda_real);
#else
	TEST_SKIP("there is no cuda.h");
#endif
}

TEST(nccl)
{
#ifdef ABI_HAS_NCCL
	compare(&abi_nccl_ours, &abi_nccl_real);
	ASSERT_EQ(abi_nccl_magic_ours(), abi_nccl_magic_real());
#else
	TEST_SKIP("there is no nccl.h");
#endif
}

TEST(nvml)
{
#ifdef ABI_HAS_NVML
	compare(&abi_nvml_ours, &abi_nvml_real);
#else
	TEST_SKIP("there is no nvml.h");
#endif
}
