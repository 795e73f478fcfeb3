/*
 * How GPUs are connected, and which of them are therefore to reduce among themselves. NVML is asked first. What it does not
 * say, or where there is none, is read from the kernel's tree of PCI devices, which knows switches, but not NVLink. No
 * CUDA, no state; any thread. Private to gpu/.
 */
#pragma once

#include "gpu/nvml_abi.h"
#include "proto/types.h"

struct gpu_place {
	uint8_t uuid[DEVICE_UUID_LEN];
	char bus_id[24]; /* "0000:3B:00.0", as the driver writes it; "" where it does not say */
};

/* Bits. Neither: what they exchange goes through a processor. */
enum { GPU_LINK_NVLINK = 1, GPU_LINK_SWITCH = 2 /* PCIe, with no host bridge between */ };

struct gpu_topology {
	const struct nvml *nvml; /* NULL: there is none */
	const char *sysfs;	 /* "/sys" */
	/* Of any pair: who said how it is connected. */
	bool by_nvml, by_sysfs;
};

unsigned gpu_topology_link(struct gpu_topology *topology, const struct gpu_place *a,
			   const struct gpu_place *b);
/*
 * Divides n GPUs: those are together that reach each other, by way of others of them as well. Groups are numbered by their
 * first GPUs. Returns how many there are.
 */
unsigned gpu_topology_divide(struct gpu_topology *topology, enum gpu_reduce mode,
			     const struct gpu_place *places, unsigned n, uint8_t *group_of);
/*
 * Says by way of which GPUs what such groups have summed goes to the host and back. asked: bits for those that are to be
 * roots, in groups that have any of them. With none asked for, all are roots, but for AUTO and ROOTS:
 *
 *	ROOTS	one GPU of each PCIe switch, since what is behind a switch shares its link: of those switches that no NIC is
 *		behind, if there are both, so that copies leave the NIC's link to the NIC
 *	AUTO	the same where such a NIC's link would otherwise be the busiest
 */
void gpu_topology_roots(struct gpu_topology *topology, enum gpu_reduce mode, uint64_t asked,
			const struct gpu_place *places, unsigned n, const uint8_t *group_of,
			bool *is_root);
