/*
 * Links between GPUs by NVML and sysfs, groups that follow from the links, and the roots of
 * groups. worker/group.c asks when it makes a job's plan.
 */
#include "gpu/topology.h"
#include "gpu/gpu.h"
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* -- By NVML ----------------------------------------------------------------------------------- */

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

/* -- By the kernel's tree of PCI devices ------------------------------------------------------- */

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

/* -- Both -------------------------------------------------------------------------------------- */

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
	/*
	 * A group's number is its first GPU's, which is no higher than any other's: then without
	 * gaps.
	 */
	for (unsigned i = 0; i < n; i++)
		group_of[i] = (uint8_t)(group_of[i] == i ? n_groups++ : group_of[group_of[i]]);
	return n_groups;
}

/* -- Roots ------------------------------------------------------------------------------------- */

/* Whether a device of this class is behind a switch that the GPU at this path is behind, too. */
static bool have_neighbour(const char *sysfs, const char *class, const char *gpu)
{
	char link[PATH_MAX], path[PATH_MAX];
	const struct dirent *entry;
	bool found = false;
	DIR *dir;

	(void)snprintf(link, sizeof(link), "%s/class/%s", sysfs, class);
	dir = opendir(link);
	while (dir && !found && (entry = readdir(dir))) {
		/* What has none is virtual. */
		if (snprintf(link, sizeof(link), "%s/class/%s/%s/device", sysfs, class,
			     entry->d_name) < (int)sizeof(link) &&
		    entry->d_name[0] != '.' && realpath(link, path))
			found = have_bridge_in_common(path, gpu);
	}
	if (dir)
		(void)closedir(dir);
	return found;
}

static bool is_beside_nic(const char *sysfs, const struct gpu_place *place)
{
	char path[PATH_MAX];

	return pci_path(sysfs, place->bus_id, path) &&
	       (have_neighbour(sysfs, "net", path) || have_neighbour(sysfs, "infiniband", path));
}

/* A group's switches. */
struct switches {
	unsigned n, n_nic;	   /* with a NIC */
	uint8_t at[GPU_RANKS_MAX]; /* of each the first GPU */
	bool has_nic[GPU_RANKS_MAX];
};

/*
 * Of n bytes of sums each of s switches' links carries n / s when all GPUs copy their slices, and
 * those of the k switches with NICs n / k more to the network. By way of the others' GPUs alone it
 * is n / (s - k), and n / k for the NICs'.
 */
static bool is_better_without_nics(unsigned s, unsigned k)
{
	/* max(1 / k, 1 / (s - k)) < 1 / k + 1 / s */
	return k && k < s && k * s < (s - k) * (s + k);
}

static void look_at_switches(const struct gpu_topology *topology, const struct gpu_place *places,
			     unsigned n, const uint8_t *group_of, const uint8_t *switch_of,
			     unsigned group, struct switches *ret)
{
	uint64_t seen = 0;

	*ret = (struct switches){ 0 };
	for (unsigned i = 0; i < n; i++) {
		bool is_first = !(seen >> switch_of[i] & 1);

		if (group_of[i] != group)
			continue;
		seen |= UINT64_C(1) << switch_of[i];
		if (!is_first)
			continue;
		ret->at[ret->n] = (uint8_t)i;
		ret->has_nic[ret->n] = is_beside_nic(topology->sysfs, &places[i]);
		ret->n_nic += ret->has_nic[ret->n++];
	}
}

static void choose_roots(const struct switches *switches, const uint8_t *group_of, unsigned n,
			 bool *is_root)
{
	unsigned group = group_of[switches->at[0]];

	for (unsigned i = 0; i < n; i++)
		is_root[i] = is_root[i] && group_of[i] != group;
	for (unsigned i = 0; i < switches->n; i++)
		is_root[switches->at[i]] = !switches->has_nic[i] || switches->n_nic == switches->n;
}

void gpu_topology_roots(struct gpu_topology *topology, enum gpu_reduce mode, uint64_t asked,
			const struct gpu_place *places, unsigned n, const uint8_t *group_of,
			bool *is_root)
{
	uint8_t switch_of[GPU_RANKS_MAX];
	struct switches switches;
	uint64_t has_asked = 0; /* groups */

	for (unsigned i = 0; i < n; i++)
		if (asked >> i & 1)
			has_asked |= UINT64_C(1) << group_of[i];
	for (unsigned i = 0; i < n; i++)
		is_root[i] = !(has_asked >> group_of[i] & 1) || asked >> i & 1;
	if (asked || (mode != GPU_REDUCE_AUTO && mode != GPU_REDUCE_ROOTS))
		return;
	(void)gpu_topology_divide(topology, GPU_REDUCE_SWITCH, places, n, switch_of);
	for (unsigned i = 0; i < n; i++) {
		/* Once for each group. */
		if (memchr(group_of, group_of[i], i))
			continue;
		look_at_switches(topology, places, n, group_of, switch_of, group_of[i], &switches);
		if (mode == GPU_REDUCE_ROOTS || is_better_without_nics(switches.n, switches.n_nic))
			choose_roots(&switches, group_of, n, is_root);
	}
}
