/* Memory of a device, given up while a worker imports it and a request that waits for it holds it. */
#include "../base/chores.h"
#include "../gpu/double.h"
#include "door.h"
#include <sched.h>

#define N 100

static uint64_t send_share(struct trainer *trainer, uint32_t number, uint64_t len)
{
	Bps__Control__Request request = BPS__CONTROL__REQUEST__INIT;
	Bps__Control__Share share = BPS__CONTROL__SHARE__INIT;
	uint8_t device[DEVICE_UUID_LEN] = { 1 }, handle[DEVICE_HANDLE_LEN] = { 2 };

	share.buffer = number;
	share.len = len;
	share.has_kind = share.has_device = share.has_handle = true;
	share.kind = MEMORY_CUDA_IPC;
	share.device = (ProtobufCBinaryData){ sizeof(device), device };
	share.handle = (ProtobufCBinaryData){ sizeof(handle), handle };
	request.body_case = BPS__CONTROL__REQUEST__BODY_SHARE;
	request.share = &share;
	return trainer_send(trainer, &request, NULL, 0);
}

/* A job of one rank, whose request waits for memory that is on its way to the worker. Returns its slot. */
static uint32_t begin(struct door **ret_door, struct trainer *trainer)
{
	struct door *door = door_new(&(struct door_options){ .features = CONTROL_FEATURE_CUDA,
							     .gpu_new = gpu_double_new });
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, N);
	uint32_t slot;

	gpu_double_hold_imports(door->gpu, true);
	trainer_open(trainer, door);
	ASSERT_OK(trainer_join(trainer, "job", 0, 1, NULL));
	ASSERT_OK(trainer_declare(trainer, 1, "t", DTYPE_FLOAT32, N, NULL));
	(void)send_share(trainer, 1, N * sizeof(float));
	DOOR_UNTIL(door, gpu_double_workers(door->gpu));
	slot = trainer_post(trainer, &entry);
	*ret_door = door;
	return slot;
}

static void end(struct door *door)
{
	struct gpu *gpu = door->gpu;

	(void)door_free(door);
	(void)gpu_double_free(gpu);
}

TEST(unshared_before_it_is_imported)
{
	struct trainer trainer;
	struct door *door;
	char text[ERROR_TEXT_MAX + 1];
	uint32_t slot = begin(&door, &trainer);
	uint64_t unshare = trainer_send_unshare(&trainer, 1);

	/* The answer to another request: what was sent before it has been read. */
	ASSERT_OK(trainer_declare(&trainer, 2, "u", DTYPE_FLOAT32, N, text));
	gpu_double_fail_imports(door->gpu);
	ASSERT_EQ(trainer_wait(&trainer, slot, text), -EIO);
	ASSERT_OK(trainer_answer(&trainer, unshare, NULL));
	trainer_close(&trainer);
	end(door);
}

TEST(its_session_ends_before_it_is_imported)
{
	struct trainer trainer;
	struct door *door;

	(void)begin(&door, &trainer);
	ASSERT_OK(loop_turn(door->loop, 0));
	chores_hold();
	trainer_send_bytes(&trainer, "no packet", 9, NULL, 0);
	trainer_expect_end(&trainer);
	gpu_double_end_workers(door->gpu);
	ASSERT_EQ(gpu_double_workers(door->gpu), 0);
	/* The sweep of its job, and the giving up of its buffers. */
	ASSERT_EQ(chores_n_held(), 2);
	chores_go_on();
	DOOR_UNTIL(door, !control_n_sessions(door->control));
	trainer_close(&trainer);
	end(door);
}

/* What is limited of a kind, half of which one user may have. */
static void limit(struct accounts *accounts, enum account_kind kind, uint64_t most)
{
	struct accounts_params limits = { .share = 50 };

	for (unsigned i = 0; i < ACCOUNT_KINDS; i++)
		limits.limits[i] = UINT64_MAX / 2;
	limits.limits[kind] = most;
	accounts_init(accounts, &limits);
}

/* They are the daemon's, of which others need some, too. */
TEST(addresses_for_memory_of_devices_are_charged)
{
	enum { TIB_ALL = 8 };
	static struct accounts accounts;
	struct door_options options = { .features = CONTROL_FEATURE_CUDA,
					.gpu_new = gpu_double_new,
					.accounts = &accounts };
	const uint64_t tib = UINT64_C(1) << 40;
	char text[ERROR_TEXT_MAX + 1];
	struct trainer trainer;
	struct door *door;
	int r;

	limit(&accounts, ACCOUNT_MAPPED, TIB_ALL * tib);
	door = door_new(&options);
	trainer_open(&trainer, door);
	for (uint32_t i = 1; i <= TIB_ALL / 2; i++)
		ASSERT_OK(trainer_answer(&trainer, send_share(&trainer, i, tib), text));
	ASSERT_EQ(trainer_answer(&trainer, send_share(&trainer, TIB_ALL, tib), text), -EDQUOT);
	ASSERT_CONTAINS(text, "bytes shared with the daemon");
	ASSERT_OK(trainer_answer(&trainer, trainer_send_unshare(&trainer, 1), text));
	/* Until they have been unmapped. */
	while ((r = trainer_answer(&trainer, send_share(&trainer, 1, tib), text)) == -EDQUOT)
		(void)sched_yield();
	ASSERT_OK(r);
	trainer_close(&trainer);
	end(door);
	accounts_done(&accounts);
}

/* Each is a process with what its drivers take. */
TEST(workers_of_gpus_are_charged)
{
	static struct accounts accounts;
	struct door_options options = { .features = CONTROL_FEATURE_CUDA,
					.gpu_new = gpu_double_new,
					.accounts = &accounts };
	struct shm_entry entry = trainer_entry(1, 1, 1, 1, N);
	char text[ERROR_TEXT_MAX + 1];
	struct trainer trainers[2];
	struct door *door;

	limit(&accounts, ACCOUNT_GPU_WORKERS, 2);
	door = door_new(&options);
	for (unsigned i = 0; i < 2; i++) {
		trainer_open(&trainers[i], door);
		ASSERT_OK(trainer_join(&trainers[i], i ? "b" : "a", 0, 1, NULL));
		ASSERT_OK(trainer_declare(&trainers[i], 1, "t", DTYPE_FLOAT32, N, NULL));
		(void)send_share(&trainers[i], 1, N * sizeof(float));
		DOOR_UNTIL(door, gpu_double_workers(door->gpu));
	}
	ASSERT_EQ(trainer_wait(&trainers[1], trainer_post(&trainers[1], &entry), text), -EDQUOT);
	ASSERT_CONTAINS(text, "workers of GPUs");
	ASSERT_EQ(gpu_double_workers(door->gpu), 1);
	/* One that is to end is nobody's any more. */
	trainer_close(&trainers[0]);
	DOOR_UNTIL(door, !quota_used(&accounts.total[ACCOUNT_GPU_WORKERS]));
	trainer_close(&trainers[1]);
	end(door);
	accounts_done(&accounts);
}
