/* The devices at work: what is posted is taken up by a thread, one work request of each queue pair after another. */
#include "double.h"

#include <stdio.h>
#include <unistd.h>

static pthread_t thread;
static bool is_running;
static unsigned failing_in; /* this many work requests from now one fails; 0: none does */
static enum ibv_wc_status failing_status;

EXPORT void fake_fail_work(unsigned status, unsigned nth)
{
	pthread_mutex_lock(&fake_lock);
	failing_in = nth;
	failing_status = (enum ibv_wc_status)status;
	pthread_mutex_unlock(&fake_lock);
}

static void complete(struct fake_qp *qp, const struct ibv_wc *wc, unsigned n_sends,
		     bool is_solicited)
{
	struct fake_cq *cq = container_of(qp->qp.send_cq, struct fake_cq, cq);
	struct fake_channel *channel = container_of(cq->cq.channel, struct fake_channel, channel);
	const uint64_t one = 1;

	if (cq->n == (unsigned)cq->cq.cqe)
		fake_abort("a completion queue of %d entries runs over", cq->cq.cqe);
	cq->entries[(cq->first + cq->n++) % (unsigned)cq->cq.cqe] =
		(struct fake_cqe){ *wc, qp, n_sends };
	if (!cq->is_armed ||
	    (cq->is_solicited_only && !is_solicited && wc->status == IBV_WC_SUCCESS))
		return;
	cq->is_armed = false;
	fake_worked.wake_ups++;
	if (write(channel->channel.fd, &one, sizeof(one)) != sizeof(one))
		fake_abort("a completion event is lost");
}

static struct fake_send *take_send(struct fake_qp *qp)
{
	struct fake_send *send = &qp->sends[qp->first_send];

	qp->first_send = (qp->first_send + 1) % qp->cap.max_send_wr;
	qp->n_waiting--;
	return send;
}

static void complete_send(struct fake_qp *qp, const struct fake_send *send,
			  enum ibv_wc_status status)
{
	struct ibv_wc wc = { .wr_id = send->wr.wr_id, .status = status, .qp_num = qp->qp.qp_num };

	qp->n_silent++;
	if (status == IBV_WC_SUCCESS && !(send->wr.send_flags & IBV_SEND_SIGNALED))
		return;
	complete(qp, &wc, qp->n_silent, false);
	qp->n_silent = 0;
}

static uint64_t take_receive(struct fake_qp *qp, struct ibv_sge *ret_sge)
{
	uint64_t id = qp->receives[qp->first_receive].wr_id;

	*ret_sge = qp->receive_sges[qp->first_receive];
	qp->first_receive = (qp->first_receive + 1) % qp->cap.max_recv_wr;
	qp->n_receives--;
	return id;
}

static void flush(struct fake_qp *qp)
{
	struct ibv_wc wc = { .status = IBV_WC_WR_FLUSH_ERR, .qp_num = qp->qp.qp_num };
	struct ibv_sge sge;

	while (qp->n_waiting)
		complete_send(qp, take_send(qp), IBV_WC_WR_FLUSH_ERR);
	while (qp->n_receives) {
		wc.wr_id = take_receive(qp, &sge);
		complete(qp, &wc, 0, false);
	}
}

void fake_qp_break(struct fake_qp *qp)
{
	qp->qp.state = IBV_QPS_ERR;
	qp->n_far = 0;
	flush(qp);
}

struct fake_qp *fake_qp_find(uint32_t number)
{
	struct fake_qp *qp;

	list_for_each (qp, &fake_qps, link)
		if (qp->qp.qp_num == number)
			return qp;
	return NULL;
}

static bool holds(uint64_t start, uint64_t len, uint64_t address, uint64_t n)
{
	return address >= start && address - start <= len && n <= len - (address - start);
}

/* Memory of our own by its local key. */
static bool may_use(const struct fake_qp *qp, const struct ibv_sge *sge, unsigned access)
{
	const struct fake_mr *mr = fake_key_region(sge->lkey);

	return mr && mr->mr.pd == qp->qp.pd && (mr->access & access) == access &&
	       holds((uintptr_t)mr->mr.addr, mr->mr.length, sge->addr, sge->length);
}

/* Memory that the other end may write to: a region's, or a window's that was opened to this queue pair. */
static bool may_be_written(const struct fake_qp *qp, uint32_t key, uint64_t address, uint32_t len)
{
	const struct fake_mr *mr = fake_key_region(key);
	const struct fake_mw *mw = fake_key_window(key);

	if (mr)
		return mr->mr.pd == qp->qp.pd && (mr->access & IBV_ACCESS_REMOTE_WRITE) &&
		       holds((uintptr_t)mr->mr.addr, mr->mr.length, address, len);
	return mw && mw->qp == qp && holds(mw->address, mw->length, address, len);
}

static enum ibv_wc_status bind_window(struct fake_qp *qp, const struct ibv_send_wr *wr)
{
	const struct ibv_mw_bind_info *info = &wr->bind_mw.bind_info;
	struct fake_mw *mw = container_of(wr->bind_mw.mw, struct fake_mw, mw);
	struct fake_mr *mr = container_of(info->mr, struct fake_mr, mr);

	if (mw->bound || wr->bind_mw.rkey >> 8 != mw->key >> 8 || wr->bind_mw.rkey == mw->key ||
	    mw->mw.pd != qp->qp.pd || mr->mr.pd != qp->qp.pd ||
	    !(mr->access & IBV_ACCESS_MW_BIND) || !(mr->access & IBV_ACCESS_LOCAL_WRITE) ||
	    !holds((uintptr_t)mr->mr.addr, mr->mr.length, info->addr, info->length))
		return IBV_WC_MW_BIND_ERR;
	mw->bound = mr;
	mr->n_windows++;
	mw->key = wr->bind_mw.rkey;
	mw->address = info->addr;
	mw->length = info->length;
	mw->qp = qp;
	return IBV_WC_SUCCESS;
}

static bool close_window(const struct fake_qp *qp, uint32_t key)
{
	struct fake_mw *mw = fake_key_window(key);

	if (!mw || mw->qp != qp)
		return false;
	mw->bound->n_windows--;
	mw->bound = NULL;
	mw->qp = NULL;
	return true;
}

/* Where a device reads and writes what is at this address of a region. */
static void *memory_at(const struct fake_mr *mr, uint64_t address)
{
	if (!mr || !mr->alias)
		return (void *)(uintptr_t)address;
	return mr->alias + (address - (uintptr_t)mr->mr.addr);
}

/* The key of what came from another process says nothing here. */
static const void *source_of(const struct fake_send *send)
{
	if (send->wr.send_flags & IBV_SEND_INLINE)
		return send->inline_data;
	return memory_at(send->sge.lkey ? fake_key_region(send->sge.lkey) : NULL, send->sge.addr);
}

static enum ibv_wc_status write_memory(struct fake_qp *to, const struct fake_send *send,
				       uint32_t len)
{
	const uint64_t address = send->wr.wr.rdma.remote_addr;
	const struct fake_mr *mr;

	if (!len)
		return IBV_WC_SUCCESS;
	if (!may_be_written(to, send->wr.wr.rdma.rkey, address, len))
		return IBV_WC_REM_ACCESS_ERR;
	mr = fake_key_region(send->wr.wr.rdma.rkey);
	memcpy(memory_at(mr, address), source_of(send), len);
	if (mr && mr->marks)
		fake_marks_set(mr->marks, mr->offset + (address - (uintptr_t)mr->mr.addr), len);
	return IBV_WC_SUCCESS;
}

/* Into a receive that is posted. That there is none is an error at once: our end counts them, and never sends without. */
static enum ibv_wc_status deliver(struct fake_qp *to, const struct fake_send *send, uint32_t len)
{
	struct ibv_wc wc = { .opcode = IBV_WC_RECV, .qp_num = to->qp.qp_num, .byte_len = len };
	bool is_write = send->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	struct ibv_sge sge;

	if (!to->n_receives)
		return IBV_WC_RNR_RETRY_EXC_ERR;
	wc.wr_id = take_receive(to, &sge);
	if (is_write) {
		wc.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
		wc.wc_flags = IBV_WC_WITH_IMM;
		wc.imm_data = send->wr.imm_data;
	} else if (len > sge.length || !may_use(to, &sge, IBV_ACCESS_LOCAL_WRITE)) {
		wc.status = len > sge.length ? IBV_WC_LOC_LEN_ERR : IBV_WC_LOC_PROT_ERR;
	} else if (send->wr.opcode == IBV_WR_SEND_WITH_INV) {
		wc.wc_flags = IBV_WC_WITH_INV;
		wc.invalidated_rkey = send->wr.invalidate_rkey;
		if (!close_window(to, send->wr.invalidate_rkey))
			wc.status = IBV_WC_REM_INV_REQ_ERR;
	}
	if (!is_write && wc.status == IBV_WC_SUCCESS)
		memcpy((void *)(uintptr_t)sge.addr, source_of(send), len);
	complete(to, &wc, 0, send->wr.send_flags & IBV_SEND_SOLICITED);
	return wc.status == IBV_WC_SUCCESS ? IBV_WC_SUCCESS : IBV_WC_REM_OP_ERR;
}

/* At the device of the other end. */
static enum ibv_wc_status arrive(struct fake_qp *to, const struct fake_send *send, uint32_t len)
{
	enum ibv_wc_status status;

	if (!to || (to->qp.state != IBV_QPS_RTR && to->qp.state != IBV_QPS_RTS))
		return IBV_WC_RETRY_EXC_ERR;
	switch (send->wr.opcode) {
	case IBV_WR_RDMA_WRITE:
		status = write_memory(to, send, len);
		break;
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		status = write_memory(to, send, len);
		if (status == IBV_WC_SUCCESS)
			status = deliver(to, send, len);
		break;
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_INV:
		status = deliver(to, send, len);
		break;
	default:
		fake_abort("ibv_post_send: the double does not have opcode %d", send->wr.opcode);
	}
	if (status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_OP_ERR)
		fake_qp_break(to);
	return status;
}

static uint32_t len_of(const struct fake_send *send)
{
	return send->wr.num_sge ? send->sge.length : 0;
}

/* Returns what is wrong at this end, and with the wire. */
static enum ibv_wc_status leave(const struct fake_qp *qp, const struct fake_send *send)
{
	uint32_t len = len_of(send);

	if (len && !(send->wr.send_flags & IBV_SEND_INLINE) && !may_use(qp, &send->sge, 0))
		return IBV_WC_LOC_PROT_ERR;
	if (fake_wire == FAKE_WIRE_CUT || (qp->is_far && !qp->tie) ||
	    (fake_wire == FAKE_WIRE_NARROW && qp->path_mtu > IBV_MTU_1024 && len > 1024))
		return IBV_WC_RETRY_EXC_ERR;
	return IBV_WC_SUCCESS;
}

static void done(struct fake_qp *qp, enum ibv_wc_status status)
{
	complete_send(qp, take_send(qp), status);
	if (status != IBV_WC_SUCCESS)
		fake_qp_break(qp);
}

/* To another process: its device does the rest. */
static void send_far(struct fake_qp *qp, const struct fake_send *send)
{
	struct fake_frame frame = {
		.kind = FAKE_FRAME_WORK,
		.len = len_of(send),
		.opcode = send->wr.opcode,
		.flags = send->wr.send_flags & IBV_SEND_SOLICITED,
		.key = send->wr.invalidate_rkey,
	};

	if (send->wr.opcode == IBV_WR_RDMA_WRITE) {
		frame.key = send->wr.wr.rdma.rkey;
		frame.address = send->wr.wr.rdma.remote_addr;
	} else if (send->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
		fake_abort("the double does not have immediates between processes");
	}
	qp->n_far++;
	fake_tie_send(qp->tie, &frame, source_of(send));
}

enum ibv_wc_status fake_work_arrived(struct fake_qp *to, const struct fake_frame *frame,
				     const void *data)
{
	struct fake_send send = {
		.wr = { .opcode = frame->opcode, .num_sge = 1, .send_flags = frame->flags },
		.sge = { .addr = (uintptr_t)data, .length = frame->len },
	};

	if (send.wr.opcode == IBV_WR_SEND_WITH_INV)
		send.wr.invalidate_rkey = frame->key;
	send.wr.wr.rdma.rkey = frame->key;
	send.wr.wr.rdma.remote_addr = frame->address;
	return arrive(to, &send, frame->len);
}

/* In their order; what was flushed meanwhile has been told. */
void fake_work_answered(struct fake_qp *qp, enum ibv_wc_status status)
{
	if (!qp->n_far)
		return;
	qp->n_far--;
	done(qp, status);
}

void fake_work_lost(struct fake_qp *qp)
{
	if (qp->n_far)
		fake_work_answered(qp, IBV_WC_RETRY_EXC_ERR);
}

/* FAKE_FAIL_WORK_FILE: "STATUS:NTH", as of fake_fail_work(), from now on. */
static void read_file(void)
{
	static const char *path;
	static bool is_known;
	unsigned status;
	FILE *file;

	if (!is_known)
		path = getenv("FAKE_FAIL_WORK_FILE");
	is_known = true;
	file = path ? fopen(path, "re") : NULL;
	if (!file)
		return;
	if (fscanf(file, "%u:%u", &status, &failing_in) != 2)
		fake_abort("%s is not of the form STATUS:NTH", path);
	failing_status = (enum ibv_wc_status)status;
	(void)fclose(file);
	(void)unlink(path);
}

/*
 * The next that is waiting, behind those that are under way to another process. Windows are opened, and what fails does, when
 * these have come to their end. Returns whether it was taken up.
 */
static bool take_up(struct fake_qp *qp)
{
	const struct fake_send *send =
		&qp->sends[(qp->first_send + qp->n_far) % qp->cap.max_send_wr];
	bool is_bind = send->wr.opcode == IBV_WR_BIND_MW;
	enum ibv_wc_status status = is_bind ? IBV_WC_SUCCESS : leave(qp, send);

	read_file();
	if (qp->n_far && (is_bind || failing_in == 1 || status != IBV_WC_SUCCESS))
		return false;
	if (failing_in && !--failing_in)
		status = failing_status;
	else if (is_bind)
		status = bind_window(qp, &send->wr);
	else if (status == IBV_WC_SUCCESS && qp->tie) {
		send_far(qp, send);
		return true;
	} else if (status == IBV_WC_SUCCESS)
		status = arrive(fake_qp_find(qp->remote), send, len_of(send));
	done(qp, status);
	return true;
}

/* Returns whether there was anything. */
static bool turn(void)
{
	struct fake_qp *qp, *next;
	bool has_worked = false;

	list_for_each_safe (qp, next, &fake_qps, link) {
		if (qp->qp.state == IBV_QPS_ERR)
			flush(qp);
		else if (qp->n_waiting > qp->n_far && fake_wire != FAKE_WIRE_STILL)
			has_worked |= take_up(qp);
	}
	return has_worked;
}

/* FAKE_FAIL_WORK: "STATUS:NTH", as of fake_fail_work(). */
static void read_environment(void)
{
	const char *fail = getenv("FAKE_FAIL_WORK");
	unsigned status;
	static bool is_read;

	if (is_read || !fail)
		return;
	is_read = true;
	if (sscanf(fail, "%u:%u", &status, &failing_in) != 2)
		fake_abort("FAKE_FAIL_WORK is not of the form STATUS:NTH");
	failing_status = (enum ibv_wc_status)status;
}

static void *fake_run(void *arg)
{
	(void)pthread_setname_np(pthread_self(),
				 "fakeverbs"); /* to tell what it does from what our end does */
	pthread_mutex_lock(&fake_lock);
	while (is_running)
		fake_fabric_turn(!turn());
	pthread_mutex_unlock(&fake_lock);
	return arg;
}

void fake_wire_start(void)
{
	is_running = true;
	read_environment();
	fake_fabric_start();
	if (pthread_create(&thread, NULL, fake_run, NULL))
		fake_abort("no thread");
}

void fake_wire_stop(void)
{
	pthread_t last = thread;

	is_running = false;
	fake_wire_wake();
	pthread_mutex_unlock(&fake_lock);
	(void)pthread_join(last, NULL);
	pthread_mutex_lock(&fake_lock);
	fake_fabric_stop();
}
