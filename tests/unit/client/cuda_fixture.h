/* A trainer with memory of devices, on the double of the driver and with the fake daemon. What fails, fails the test. */
#pragma once

#include "cu.h"
#include "fake.h"

#define N    1000
#define WIDE ((size_t)4 << 20)

extern const struct cuda *cu;
extern void *(*host_of)(CUdeviceptr ptr); /* where the double has it */

/* The rank of a job of one, with a context of device 0, a stream, and a tensor of N float32. */
struct fixture {
	struct fake *fake;
	struct bps_client *client;
	struct bps_tensor *tensor;
	CUcontext context;
	CUstream stream;
};

struct fixture fixture_init(uint64_t features);
void fixture_done(struct fixture *f);

#define FIXTURE_WITH(features) \
	_cleanup_(fixture_done) struct fixture f = fixture_init(CONTROL_FEATURE_RESUME | (features))
#define FIXTURE FIXTURE_WITH(CONTROL_FEATURE_CUDA)

/* Device memory by cuMemAlloc(), which the fake finds when it is shared next. It goes with the fixture, as the others do. */
CUdeviceptr alloc(struct fixture *f, size_t len);
CUdeviceptr managed(void);
CUdeviceptr pooled(void);
/* The same as alloc() by cuMemCreate(), of n pieces side by side. */
CUdeviceptr map_pieces(unsigned n);
void map_piece(CUdeviceptr ptr);
/* What was allocated last. */
void release_last(void);

void fill(const struct fixture *f, CUdeviceptr ptr, unsigned value);
/* Behind what the stream has done so far. */
void assert_filled(const struct fixture *f, CUdeviceptr ptr, unsigned value);
struct bps_submit_params params_of(const struct fixture *f, CUdeviceptr in, CUdeviceptr out);
struct bps_request *submit(const struct fixture *f, CUdeviceptr in, CUdeviceptr out);

/* A stream that does not go on until the flag is raised. */
struct gate {
	_Atomic uint32_t *flag;
	CUdeviceptr address;
};

struct gate gate_close(const struct fixture *f);
void gate_open(const struct gate *gate);
