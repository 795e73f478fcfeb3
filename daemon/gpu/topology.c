#include "gpu/topology.h"
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- By NVML ------------------------------------------------------------------------------------------------------ */

static nvmlDevice_t nvml_device(const struct nvml *nvml, const struct gpu_place *place)
{
	const uint8_t *u = place->uuid;
	nvmlDevice_t found;
	char text[48];

	(void)snprintf(text, sizeof(text),
		       "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
		       u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11],
		       u[12], u[13], u[14], u[15]);
	return nvml->nvmlDeviceGetHandleByUUID(text, &found) == NVML_SUCCESS ? found : NULL;
}

/* Returns whether it says how they are connected by PCIe. */
static bool ask_nvml(const struct nvml *nvml, const struct gpu_place *a, const struct gpu_place *b,
		     unsigned *link)
{
	nvmlDevice_t first = nvml_device(nvml, a), second = nvml_device(nvml, b);
	nvmlGpuTopologyLevel_t level;
	nvmlGpuP2PStatus_t status;

	if (!first || !second)
		return false;
	if (nvml->nvmlDeviceGetP2PStatus(first, second, NVML_P2P_CAPS_INDEX_NVLINK, &status) ==
		    NVML_SUCCESS &&
	    status == NVML_P2P_STATUS_OK)
		*link |= GPU_LINK_NVLINK;
	/* Not supported in some virtual machines. */
	if (nvml->nvmlDeviceGetTopologyCommonAncestor(first, second, &level) != NVML_SUCCESS)
		return false;
	if (level <= NVML_TOPOLOGY_MULTIPLE)
		*link |= GPU_LINK_SWITCH;
	return true;
}

/* -- By the kernel's tree of PCI devices -------------------------------------------------------------------------- */

/* .../pci0000:3a/0000:3a:00.0/0000:3b:00.0/... : the way from the host bridge to the device. */
static bool pci_path(const char *sysfs, const char *bus_id, char path[PATH_MAX])
{
	unsigned domain, bus, device, function;
	char link[PATH_MAX];
	int len;

	/* The driver and the kernel write it differently. */
	if (sscanf(bus_id, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4)
		return false;
	len = snprintf(link, sizeof(link), "%s/bus/pci/devices/%04x:%02x:%02x.%x", sysfs, domain,
		       bus, device, function);
	return len < (int)sizeof(link) && realpath(link, path);
}

/* Whether the ways part behind a bridge that is below the host's. */
static bool have_bridge_in_common(const char *a, const char *b)
{
	const char *host_bridge = strstr(a, "/pci"), *at;
	size_t common = 0, end = 0;

	if (!host_bridge)
		return false;
	for (; a[common] && a[common] == b[common]; common++)
		if (a[common] == '/')
			end = common; /* of the last name that is the same */
	at = strchr(host_bridge + 1, '/');
	/* Up to there is the host bridge itself; one name more, at least. */
	return at && end > (size_t)(at - a);
}

static bool ask_sysfs(const char *sysfs, const struct gpu_place *a, const struct gpu_place *b,
		      unsigned *link)
{
	char first[PATH_MAX], second[PATH_MAX];

	if (!pci_path(sysfs, a->bus_id, first) || !pci_path(sysfs, b->bus_id, second))
		return false;
	if (have_bridge_in_common(first, second))
		*link |= GPU_LINK_SWITCH;
	return true;
}

/* -- Both --------------------------------------------------------------------------------------------------------- */

unsigned gpu_topology_link(struct gpu_topology *topology, const struct gpu_place *a,
			   const struct gpu_place *b)
{
	unsigned link = 0;

	if (topology->nvml && ask_nvml(topology->nvml, a, b, &link))
		topology->by_nvml = true;
	else if (ask_sysfs(topology->sysfs, a, b, &link))
		topology->by_sysfs = true;
	return link;
}

static bool belong_together(struct gpu_topology *topology, enum gpu_reduce mode,
			    const struct gpu_place *a, const struct gpu_place *b)
{
	unsigned wanted =
		mode == GPU_REDUCE_SWITCH ? GPU_LINK_SWITCH : GPU_LINK_SWITCH | GPU_LINK_NVLINK;

	return mode == GPU_REDUCE_NCCL || gpu_topology_link(topology, a, b) & wanted;
}

unsigned gpu_topology_divide(struct gpu_topology *topology, enum gpu_reduce mode,
			     const struct gpu_place *places, unsigned n, uint8_t *group_of)
{
	unsigned n_groups = 0;

	for (unsigned i = 0; i < n; i++)
		group_of[i] = (uint8_t)i;
	if (mode == GPU_REDUCE_HOST)
		return n;
	/* A pair that is connected makes one group of its two, which gets the lower number. */
	for (unsigned i = 0; i < n; i++) {
		for (unsigned k = 0; k < i; k++) {
			uint8_t one = MIN(group_of[i], group_of[k]),
				other = MAX(group_of[i], group_of[k]);

			if (one == other ||
			    !belong_together(topology, mode, &places[k], &places[i]))
				continue;
			for (unsigned m = 0; m <= i; m++)
				if (group_of[m] == other)
					group_of[m] = one;
		}
	}
	/* A group's number is its first GPU's, which is no higher than any other's: then without gaps. */
	for (unsigned i = 0; i < n; i++)
		group_of[i] = (uint8_t)(group_of[i] == i ? n_groups++ : group_of[group_of[i]]);
	return n_groups;
}
