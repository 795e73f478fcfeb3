/* Why a call failed, kept for bps_error(); and what the environment says. Any thread. */
#pragma once

#include "proto/c.h"
#include <stddef.h>
#include <stdint.h>

/* What the library exports: libbps_client.sym. */
#define _public_ __attribute__((__visibility__("default")))

/* Remembers why for bps_error(), and returns error. */
int error_set(int error, const char *format, ...) _printf_(2, 3);

/*
 * Copies a structure that the caller filled and that starts with its size, which may be that of an older or a newer
 * header: what he does not know is 0, what we do not know must be. Returns 0 or -EINVAL.
 */
int error_copy_params(void *to, size_t to_size, const void *from, const char *name);

/* -- environment.c ----------------------------------------------------------------------------------------------- */

/* How long to wait for a lost daemon: as given, if that is not 0, else as the environment says. Negative: not at all. */
int environment_restart_timeout(int64_t given_ms, int64_t *ret_timeout_ms);
/* How long a wait for a request looks before it sleeps. */
int environment_spin(int64_t *ret_spin_ns);
/* BPS_CUDA_BLOCKING=1: streams do not wait, the host does. BPS_CUDA=host: memory on devices is copied through the host's. */
int environment_cuda(bool *ret_blocking, bool *ret_host);
