/*
 * What scripts/gpu-check's programs share. gpu-rules asks a driver what it does where bps, or the test double, assumes
 * something, and needs a C compiler alone; gpu-trainer asks the same of a daemon that runs. Each rule runs in a process of its own, so that one that hangs or loses its context is no other's trouble.
 */
#pragma once

#include "proto/cuda_abi.h"
#include <stdio.h>
#include <sys/types.h>

/* What a rule may take; then it is killed and has seen "no answer". Four rules that wait must fit into gpu-check's time. */
#define RULE_S 60

struct rule {
	const char *name;
	const char *asks;
	/* What run() will have seen, here and on the double. NULL: a time, of which nothing is assumed. */
	const char *assumed;
	bool needed;   /* bps does not work without; else only the double would have to learn */
	int n_devices; /* that it takes */
	void (*run)(void);
	/* What a driver is known to do instead, where the double is stricter on purpose: what runs on it runs on both. NULL: the same. */
	const char *driver;
};

/* The program that main() is of: tables of rules and of times. Each list of tables ends with NULL, each table with an empty
 * name. */
struct check_program {
	const char *name;
	const struct rule *const *rules;
	const struct rule *const *times;
};
extern const struct check_program check_program;

/* The driver, in the process of a rule, after start(). */
extern const struct cuda *cu;

/* The device's primary context, retained and current. */
CUcontext start(int device);
/* What the rule has seen; its process ends. */
_Noreturn void seen(const char *format, ...) _printf_(1, 2);
/* A call without which the rule has nothing to see. */
#define CU(call) check_call(#call, cu->call)
void check_call(const char *call, CUresult result);
#define CHECK(x) check_true(#x, (x))
void check_true(const char *what, bool is_true);
const char *name_of(CUresult result);

/* Pinned memory of the host. */
void *pinned(size_t len);
/* len bytes of device memory with a pattern. */
CUdeviceptr pattern_new(size_t len, unsigned seed);
void pattern_put(CUdeviceptr ptr, size_t len, unsigned seed);
bool pattern_is(CUdeviceptr ptr, size_t len, unsigned seed);
/* A page of words that host and device use, of a memfd if ret_fd is not NULL. */
uint32_t *flags_new(CUdeviceptr *ret_device, int *ret_fd);
uint32_t *flags_map(int fd, CUdeviceptr *ret_device);
void flag_set(uint32_t *flag, uint32_t value);
uint32_t flag_get(const uint32_t *flag);
/* Until the stream is empty, at most RULE_S / 2. */
bool comes_to_end(CUstream stream);

/*
 * Another process; to be called before start(), since CUDA does not survive fork(). It runs run(fd) and ends; fd is the
 * other end of *ret_fd.
 */
pid_t peer_new(void (*run)(int fd), int *ret_fd);
void peer_kill(pid_t pid);
struct note {
	CUipcMemHandle handle;
	uint64_t number, number2;
};
/* With a descriptor, or -1. */
void tell(int fd, const struct note *note, int passed);
int hear(int fd, struct note *ret_note);
