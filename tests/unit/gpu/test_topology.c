/* Which GPUs reduce among themselves, on machines that are made up. */
#include "gpu/topology.h"
#include "test.h"
#include <limits.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define N_MAX 8

/* What the pretend NVML knows: machine.nvlink[a] has a bit for each GPU that a is connected to. */
static struct {
	unsigned n;
	uint8_t nvlink[N_MAX];
	nvmlGpuTopologyLevel_t level[N_MAX][N_MAX];
	bool levels_unknown;
} machine;

static nvmlReturn_t by_uuid(const char *uuid, nvmlDevice_t *device)
{
	unsigned number;

	ASSERT_EQ(sscanf(uuid, "GPU-%2x000000-0000-0000-0000-000000000000", &number), 1);
	if (number >= machine.n)
		return NVML_ERROR_NOT_FOUND;
	*device = (nvmlDevice_t)(intptr_t)(number + 1);
	return NVML_SUCCESS;
}

static unsigned number_of(nvmlDevice_t device)
{
	return (unsigned)(intptr_t)device - 1;
}

static nvmlReturn_t ancestor(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t *level)
{
	if (machine.levels_unknown)
		return NVML_ERROR_NOT_SUPPORTED;
	*level = machine.level[number_of(a)][number_of(b)];
	return NVML_SUCCESS;
}

static nvmlReturn_t p2p(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t what,
			nvmlGpuP2PStatus_t *status)
{
	ASSERT_EQ(what, NVML_P2P_CAPS_INDEX_NVLINK);
	*status = machine.nvlink[number_of(a)] >> number_of(b) & 1 ? NVML_P2P_STATUS_OK
								   : NVML_P2P_STATUS_NOT_SUPPORTED;
	return NVML_SUCCESS;
}

static const struct nvml nvml = {
	.nvmlDeviceGetHandleByUUID = by_uuid,
	.nvmlDeviceGetTopologyCommonAncestor = ancestor,
	.nvmlDeviceGetP2PStatus = p2p,
};

/* switch_of[i]: GPUs with the same number are behind one switch. */
static void machine_set(unsigned n, const uint8_t *nvlink, const char *switch_of)
{
	memset(&machine, 0, sizeof(machine));
	machine.n = n;
	for (unsigned a = 0; a < n; a++) {
		machine.nvlink[a] = nvlink ? nvlink[a] : 0;
		for (unsigned b = 0; b < n; b++)
			machine.level[a][b] = switch_of && switch_of[a] == switch_of[b]
						      ? NVML_TOPOLOGY_MULTIPLE
						      : NVML_TOPOLOGY_HOSTBRIDGE;
	}
}

static void make_dirs(char *path)
{
	for (char *slash = path + 1; (slash = strchr(slash, '/')); slash++) {
		*slash = 0;
		(void)mkdir(path, 0755);
		*slash = '/';
	}
	ASSERT_TRUE(!mkdir(path, 0755) || errno == EEXIST);
}

/* A tree as the kernel's: paths[i] below devices/, whose last name is the GPU's address. */
static const char *sysfs_at(const char *dir, const char *const *paths, unsigned n)
{
	static char root[PATH_MAX];
	char path[2 * PATH_MAX], target[PATH_MAX];

	(void)snprintf(root, sizeof(root), "%s/sys", dir);
	for (unsigned i = 0; i < n; i++) {
		(void)snprintf(path, sizeof(path), "%s/devices/%s", root, paths[i]);
		make_dirs(path);
		(void)snprintf(path, sizeof(path), "%s/bus/pci/devices", root);
		make_dirs(path);
		(void)snprintf(path, sizeof(path), "%s/bus/pci/devices/%s", root,
			       strrchr(paths[i], '/') + 1);
		(void)snprintf(target, sizeof(target), "../../../devices/%s", paths[i]);
		ASSERT_OK(symlink(target, path));
	}
	return root;
}

/* A device of this class that is at this path below devices/; NULL: one that is virtual. */
static void sysfs_add(const char *root, const char *class, const char *name, const char *path)
{
	char dir[2 * PATH_MAX], target[PATH_MAX];

	(void)snprintf(dir, sizeof(dir), "%s/class/%s/%s", root, class, name);
	make_dirs(dir);
	if (!path)
		return;
	(void)strcat(dir, "/device");
	(void)snprintf(target, sizeof(target), "../../../devices/%s", path);
	ASSERT_OK(symlink(target, dir));
	(void)snprintf(dir, sizeof(dir), "%s/devices/%s", root, path);
	make_dirs(dir);
}

/* The groups of n GPUs, as text. */
static const char *divided(struct gpu_topology *topology, enum gpu_reduce mode, unsigned n,
			   const char *const *bus_ids)
{
	static char text[N_MAX + 1];
	struct gpu_place places[N_MAX] = { 0 };
	uint8_t group_of[N_MAX];
	unsigned n_groups, most = 0;

	for (unsigned i = 0; i < n; i++) {
		places[i].uuid[0] = (uint8_t)i;
		if (bus_ids)
			(void)snprintf(places[i].bus_id, sizeof(places[i].bus_id), "%s",
				       bus_ids[i]);
	}
	n_groups = gpu_topology_divide(topology, mode, places, n, group_of);
	for (unsigned i = 0; i < n; i++) {
		text[i] = (char)('0' + group_of[i]);
		most = MAX(most, group_of[i] + 1u);
	}
	text[n] = 0;
	ASSERT_EQ(n_groups, most);
	return text;
}

TEST(machines_that_nvml_knows)
{
	static const uint8_t all[N_MAX] = { 0xfe, 0xfd, 0xfb, 0xf7, 0xef, 0xdf, 0xbf, 0x7f };
	/* A cube mesh: each is connected to four others, some only by way of these. */
	static const uint8_t mesh[N_MAX] = { 0x1e, 0x2d, 0x4b, 0x87, 0xe1, 0xd2, 0xb4, 0x78 };
	/* A chain whose first and third come before the one between them. */
	static const uint8_t chain[4] = { 0x04, 0x04, 0x03, 0x00 };
	static const uint8_t bridges[4] = { 0x02, 0x01, 0x08, 0x04 };
	static const struct {
		unsigned n;
		const uint8_t *nvlink;
		const char *switch_of, *automatic, *by_switch;
	} cases[] = {
		{ 1, NULL, "0", "0", "0" },
		{ 8, all, "00112233", "00000000", "00112233" },
		{ 8, mesh, "00112233", "00000000", "00112233" },
		{ 8, NULL, "00001111", "00001111", "00001111" },
		{ 8, NULL, "01230123", "01230123", "01230123" },
		{ 4, chain, "0123", "0001", "0123" },
		/* Two bridges, and a switch that has one GPU of each: all reach each other. */
		{ 4, bridges, "0112", "0000", "0112" },
		{ 4, bridges, "0011", "0011", "0011" },
		{ 4, NULL, "0123", "0123", "0123" },
		{ 3, NULL, "010", "010", "010" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct gpu_topology topology = { .nvml = &nvml, .sysfs = test_dir() };
		char apart[N_MAX + 1];

		machine_set(cases[i].n, cases[i].nvlink, cases[i].switch_of);
		ASSERT_STR(divided(&topology, GPU_REDUCE_AUTO, cases[i].n, NULL),
			   cases[i].automatic);
		ASSERT_STR(divided(&topology, GPU_REDUCE_SWITCH, cases[i].n, NULL),
			   cases[i].by_switch);
		ASSERT_TRUE(topology.by_nvml == (cases[i].n > 1) && !topology.by_sysfs);
		(void)snprintf(apart, sizeof(apart), "%.*s", (int)cases[i].n, "01234567");
		ASSERT_STR(divided(&topology, GPU_REDUCE_HOST, cases[i].n, NULL), apart);
		(void)snprintf(apart, sizeof(apart), "%.*s", (int)cases[i].n, "00000000");
		ASSERT_STR(divided(&topology, GPU_REDUCE_NCCL, cases[i].n, NULL), apart);
	}
}

/* Two sockets; on the first a switch of two levels and a GPU on a root port of its own, on the second another switch. */
static const char *const paths[] = {
	"pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:08.0/0000:3d:00.0",
	"pci0000:3a/0000:3a:00.0/0000:3b:00.0/0000:3c:10.0/0000:3e:00.0/0000:3f:00.0/0000:40:00.0",
	"pci0000:3a/0000:3a:02.0/0000:50:00.0",
	"pci0000:b0/0000:b0:00.0/0000:b1:00.0/0000:b2:00.0/0000:b3:00.0",
	"pci0000:b0/0000:b0:00.0/0000:b1:00.0/0000:b2:04.0/0000:b4:00.0",
	"pci10000:00/10000:00:01.0/10000:01:00.0",
};
/* In capitals, as the driver writes them. */
static const char *const ids[] = { "0000:3D:00.0", "0000:40:00.0", "0000:50:00.0",
				   "0000:B3:00.0", "0000:B4:00.0", "10000:01:00.0" };

TEST(without_nvml_the_pci_bus_is_looked_at)
{
	struct gpu_topology topology = { .sysfs = sysfs_at(test_dir(), paths, ARRAY_SIZE(paths)) };

	ASSERT_STR(divided(&topology, GPU_REDUCE_AUTO, 6, ids), "001223");
	ASSERT_STR(divided(&topology, GPU_REDUCE_SWITCH, 6, ids), "001223");
	ASSERT_TRUE(topology.by_sysfs && !topology.by_nvml);
}

TEST(what_nvml_does_not_say_is_looked_for)
{
	struct gpu_topology topology = { .nvml = &nvml,
					 .sysfs = sysfs_at(test_dir(), paths, ARRAY_SIZE(paths)) };
	static const uint8_t nvlink[6] = { 0, 0, 0x20, 0, 0, 0x04 };

	/* It knows the links of NVLink alone. */
	machine_set(6, nvlink, NULL);
	machine.levels_unknown = true;
	ASSERT_STR(divided(&topology, GPU_REDUCE_AUTO, 6, ids), "001221");
	ASSERT_STR(divided(&topology, GPU_REDUCE_SWITCH, 6, ids), "001223");
	ASSERT_TRUE(topology.by_sysfs && !topology.by_nvml);
	/* It knows the first three devices. */
	machine_set(3, NULL, "012");
	ASSERT_STR(divided(&topology, GPU_REDUCE_AUTO, 6, ids), "012334");
	ASSERT_TRUE(topology.by_nvml);
}

TEST(what_nobody_knows_is_far_apart)
{
	static const char *const bad[] = { "", "FFFF:01:00.0", "nothing", "0000:3D:00.0" };
	struct gpu_topology topology = { .sysfs = sysfs_at(test_dir(), paths, ARRAY_SIZE(paths)) };
	struct gpu_topology nowhere = { .sysfs = "/dev/null" };

	ASSERT_STR(divided(&topology, GPU_REDUCE_AUTO, 4, bad), "0123");
	ASSERT_STR(divided(&nowhere, GPU_REDUCE_AUTO, 6, ids), "012345");
	ASSERT_TRUE(!topology.by_sysfs && !nowhere.by_sysfs);
}

/* -- Roots -------------------------------------------------------------------------------------------------------- */

/* Up to four switches of two GPUs each, on root ports of their own. */
static const char *const switched[] = {
	"pci0000:10/0000:10:00.0/0000:11:00.0/0000:12:00.0/0000:13:00.0",
	"pci0000:10/0000:10:00.0/0000:11:00.0/0000:12:01.0/0000:14:00.0",
	"pci0000:20/0000:20:00.0/0000:21:00.0/0000:22:00.0/0000:23:00.0",
	"pci0000:20/0000:20:00.0/0000:21:00.0/0000:22:01.0/0000:24:00.0",
	"pci0000:30/0000:30:00.0/0000:31:00.0/0000:32:00.0/0000:33:00.0",
	"pci0000:30/0000:30:00.0/0000:31:00.0/0000:32:01.0/0000:34:00.0",
	"pci0000:40/0000:40:00.0/0000:41:00.0/0000:42:00.0/0000:43:00.0",
	"pci0000:40/0000:40:00.0/0000:41:00.0/0000:42:01.0/0000:44:00.0",
};
static const char *const switched_ids[] = { "0000:13:00.0", "0000:14:00.0", "0000:23:00.0",
					    "0000:24:00.0", "0000:33:00.0", "0000:34:00.0",
					    "0000:43:00.0", "0000:44:00.0" };
/* NICs that are behind the same switches, one of two functions; and one on a root port of its own. */
static const char *const nics[] = {
	"pci0000:10/0000:10:00.0/0000:11:00.0/0000:12:02.0/0000:15:00.0",
	"pci0000:20/0000:20:00.0/0000:21:00.0/0000:22:02.0/0000:25:00.1",
	"pci0000:30/0000:30:00.0/0000:31:00.0/0000:32:02.0/0000:35:00.0",
	"pci0000:40/0000:40:00.0/0000:41:00.0/0000:42:02.0/0000:45:00.0",
};
static const char far_nic[] = "pci0000:10/0000:10:03.0/0000:19:00.0";

static const char *roots(struct gpu_topology *topology, enum gpu_reduce mode, uint64_t asked,
			 unsigned n)
{
	static char text[N_MAX + 1];
	struct gpu_place places[N_MAX] = { 0 };
	uint8_t group_of[N_MAX];
	bool is_root[N_MAX];

	for (unsigned i = 0; i < n; i++) {
		places[i].uuid[0] = (uint8_t)i;
		(void)snprintf(places[i].bus_id, sizeof(places[i].bus_id), "%s", switched_ids[i]);
	}
	(void)gpu_topology_divide(topology, mode, places, n, group_of);
	gpu_topology_roots(topology, mode, asked, places, n, group_of, is_root);
	for (unsigned i = 0; i < n; i++)
		text[i] = is_root[i] ? '1' : '0';
	text[n] = 0;
	return text;
}

/* Which switches have NICs, of which class; NVLink connects all GPUs. */
TEST(roots_leave_the_links_of_nics_to_them)
{
	static const uint8_t all[N_MAX] = { 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff };
	static const struct {
		unsigned n;
		const char *nics; /* behind each switch: n (net), i (infiniband), - */
		const char *automatic, *by_roots;
	} cases[] = {
		/* None: the copies have all links. */
		{ 8, "----", "11111111", "10101010" },
		/* One for each: roots make no link less busy. */
		{ 8, "nini", "11111111", "10101010" },
		{ 8, "n---", "00101010", "00101010" },
		{ 8, "-i--", "10001010", "10001010" },
		{ 8, "i--n", "00101000", "00101000" },
		/* The one that is left would be busier than any. */
		{ 8, "nnn-", "11111111", "00000010" },
		{ 4, "n-", "0010", "0010" },
		{ 4, "-n", "1000", "1000" },
		{ 4, "ii", "1111", "1010" },
		{ 2, "n", "11", "10" },
		{ 1, "n", "1", "1" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
		struct gpu_topology topology = { .nvml = &nvml };
		unsigned n = cases[i].n;
		char dir[64];

		/* A tree for each. */
		(void)snprintf(dir, sizeof(dir), "%s/case%zu", test_dir(), i);
		ASSERT_OK(mkdir(dir, 0755));
		topology.sysfs = sysfs_at(dir, switched, n);
		machine_set(n, all, "00112233");
		sysfs_add(topology.sysfs, "net", "lo", NULL);
		sysfs_add(topology.sysfs, "net", "eth0", far_nic);
		for (unsigned k = 0; cases[i].nics[k]; k++)
			if (cases[i].nics[k] != '-')
				sysfs_add(topology.sysfs,
					  cases[i].nics[k] == 'n' ? "net" : "infiniband",
					  (char[]){ 'x', (char)('0' + k), 0 }, nics[k]);
		ASSERT_STR(roots(&topology, GPU_REDUCE_AUTO, 0, n), cases[i].automatic);
		ASSERT_STR(roots(&topology, GPU_REDUCE_ROOTS, 0, n), cases[i].by_roots);
		/* Each switch a group of its own: by way of its first GPU, or all. */
		machine_set(n, NULL, "00112233");
		ASSERT_STR(roots(&topology, GPU_REDUCE_ROOTS, 0, n), n == 1   ? "1"
								     : n == 2 ? "10"
								     : n == 4 ? "1010"
									      : "10101010");
		ASSERT_TRUE(!strchr(roots(&topology, GPU_REDUCE_AUTO, 0, n), '0'));
		ASSERT_TRUE(!strchr(roots(&topology, GPU_REDUCE_SWITCH, 0, n), '0'));
		ASSERT_TRUE(!strchr(roots(&topology, GPU_REDUCE_NCCL, 0, n), '0'));
	}
}

TEST(roots_that_were_asked_for)
{
	static const uint8_t all[N_MAX] = { 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff };
	struct gpu_topology topology = { .nvml = &nvml, .sysfs = test_dir() };

	machine_set(8, all, "00112233");
	for (unsigned mode = GPU_REDUCE_AUTO; mode <= GPU_REDUCE_ROOTS; mode++)
		if (mode != GPU_REDUCE_HOST && mode != GPU_REDUCE_SWITCH)
			ASSERT_STR(roots(&topology, mode, 0x0c, 8), "00110000");
	/* In the groups that have any; the others go by all of theirs. */
	ASSERT_STR(roots(&topology, GPU_REDUCE_SWITCH, 0x0c, 8), "11111111");
	ASSERT_STR(roots(&topology, GPU_REDUCE_SWITCH, 0x41, 8), "10111110");
	/* Of what is not there nothing is known. */
	topology.nvml = NULL;
	ASSERT_STR(roots(&topology, GPU_REDUCE_ROOTS, 0, 4), "1111");
	ASSERT_STR(roots(&topology, GPU_REDUCE_AUTO, 0, 4), "1111");
}
