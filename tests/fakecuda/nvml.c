/*
 * The test double for libnvidia-ml.so.1: how the machine of the double's driver is wired (FAKECUDA_TOPOLOGY), and
 *
 *   FAKENVML_COMPUTE_MODE   what mode devices are in (a number; default 0)
 */
#include "fake.h"

#include "daemon/gpu/nvml_abi.h"
#include <strings.h>

#define NVML_DECLARE_(need, name, version, result, parameters) \
	EXPORT result name##version parameters;
NVML_ABI_FUNCTIONS(NVML_DECLARE_)

/* A handle is the physical number and one. */
static int physical_of(nvmlDevice_t device)
{
	return (int)(intptr_t)device - 1;
}

/* What was asked to fail does. */
#define ENTER_NVML()                                             \
	do {                                                     \
		nvmlReturn_t enter_;                             \
		fakecuda_trace(__func__);                        \
		enter_ = (nvmlReturn_t)fakecuda_fault(__func__); \
		if (enter_)                                      \
			return enter_;                           \
	} while (0)

static bool is_device(nvmlDevice_t device)
{
	return physical_of(device) >= 0 && physical_of(device) < fakecuda_n_physical();
}

nvmlReturn_t nvmlInit_v2(void)
{
	ENTER_NVML();
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlShutdown(void)
{
	return NVML_SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t result)
{
#define TEXT(name, value) \
	case value:       \
		return #name;

	switch ((int)result) {
		NVML_ABI_RESULTS(TEXT)
	}
	return "unknown";
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int len)
{
	snprintf(version, len, "test double");
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	char text[FAKECUDA_UUID_TEXT_LEN];

	ENTER_NVML();
	for (int i = 0; i < fakecuda_n_physical(); i++) {
		fakecuda_uuid_text(i, text);
		if (!strcasecmp(uuid, text)) {
			*device = (nvmlDevice_t)(intptr_t)(i + 1);
			return NVML_SUCCESS;
		}
	}
	return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, nvmlComputeMode_t *mode)
{
	const char *text = getenv("FAKENVML_COMPUTE_MODE");

	if (!is_device(device))
		return NVML_ERROR_INVALID_ARGUMENT;
	*mode = text ? (nvmlComputeMode_t)strtol(text, NULL, 10) : NVML_COMPUTEMODE_DEFAULT;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b,
						 nvmlGpuTopologyLevel_t *level)
{
	ENTER_NVML();
	if (!is_device(a) || !is_device(b) || a == b)
		return NVML_ERROR_INVALID_ARGUMENT;
	*level = fakecuda_link(physical_of(a), physical_of(b)) & FAKECUDA_LINK_SWITCH
			 ? NVML_TOPOLOGY_SINGLE
			 : NVML_TOPOLOGY_SYSTEM;
	return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t what,
				    nvmlGpuP2PStatus_t *status)
{
	int link;

	ENTER_NVML();
	if (!is_device(a) || !is_device(b) || a == b)
		return NVML_ERROR_INVALID_ARGUMENT;
	link = fakecuda_link(physical_of(a), physical_of(b));
	if (what == NVML_P2P_CAPS_INDEX_NVLINK)
		*status = link & FAKECUDA_LINK_NVLINK ? NVML_P2P_STATUS_OK
						      : NVML_P2P_STATUS_NOT_SUPPORTED;
	else
		*status = link ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
	return NVML_SUCCESS;
}
