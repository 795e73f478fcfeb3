/*
 * Tensors of a session: declared under the trainer's numbers, and released. request.c brings the
 * packets; at the end of a job what was not answered is; ring.c finds tensors by number.
 */
#include "control/request.h"

#define NUMBERED_MIN 64

static int check_declare(const struct session *session, const Bps__Control__Declare *m,
			 struct failure *failure)
{
	if (!session->job.is_in || session->job.join_id)
		return failure_set(failure, -ENOTCONN, "tensor %s: %s", m->name,
				   session->job.last.status && !session->job.is_in
					   ? session->job.last.text
					   : "in no job");
	if (!m->tensor || map_find(&session->tensors.map, m->tensor))
		return failure_set(failure, -EEXIST, "tensor %s: number %u is %s", m->name,
				   m->tensor, m->tensor ? "in use" : "none");
	if (session->tensors.n >= session->control->params.max_tensors)
		return failure_set(
			failure, -EDQUOT,
			"tensor %s: %u tensors are declared already, as many as "
			"max_tensors allows: give a step the names of the step before, or "
			"none",
			m->name, session->control->params.max_tensors);
	return 0;
}

/* How much memory that takes follows from how many there are. Without it, it is found among all. */
static void number_tensor(struct session *session, struct session_tensor *tensor)
{
	size_t n = MAX(session->tensors.n_numbered, (size_t)NUMBERED_MIN);
	struct session_tensor **grown;

	if (tensor->number >= 2 * session->tensors.n + NUMBERED_MIN)
		return;
	while (n <= tensor->number)
		n *= 2;
	if (n > session->tensors.n_numbered) {
		grown = held_new(&session->held, n * sizeof(grown[0]));
		if (!grown)
			return;
		if (session->tensors.n_numbered)
			memcpy(grown, session->tensors.numbered,
			       session->tensors.n_numbered * sizeof(grown[0]));
		held_free(session->tensors.numbered);
		session->tensors.numbered = grown;
		session->tensors.n_numbered = n;
	}
	session->tensors.numbered[tensor->number] = tensor;
}

static void unnumber_tensor(struct session *session, const struct session_tensor *tensor)
{
	if (tensor->number < session->tensors.n_numbered &&
	    session->tensors.numbered[tensor->number] == tensor)
		session->tensors.numbered[tensor->number] = NULL;
}

static struct session_tensor *take_tensor(struct session *session)
{
	struct session_tensor *tensor = session->tensors.spare;

	if (!tensor)
		return bulk_take(&session->tensors.bulk, sizeof(*tensor));
	session->tensors.spare = TAKE_PTR(tensor->next_spare);
	return tensor;
}

static void spare_tensor(struct session *session, struct session_tensor *tensor)
{
	*tensor = (struct session_tensor){ .next_spare = session->tensors.spare };
	session->tensors.spare = tensor;
}

/* Requests about the tensor have come, or were answered. */
static void note_asked(struct session_tensor *tensor)
{
	if (!tensor->declare_id && !tensor->release_id)
		list_remove(&tensor->asked);
	else if (!list_linked(&tensor->asked))
		list_push_back(&tensor->session->tensors.asked, &tensor->asked);
}

static void undeclare(struct session *session, struct session_tensor *tensor)
{
	list_remove(&tensor->asked);
	map_remove(&session->tensors.map, &tensor->entry);
	session->tensors.n--;
	unnumber_tensor(session, tensor);
	spare_tensor(session, tensor);
}

static void on_declared(struct agent_declaration *declaration, const struct failure *failure,
			uint64_t key, uint32_t part_bytes)
{
	struct session_tensor *tensor =
		container_of(declaration, struct session_tensor, declaration);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__Declared declared = BPS__CONTROL__DECLARED__INIT;
	uint64_t id = tensor->declare_id;

	tensor->declare_id = 0;
	note_asked(tensor);
	if (failure) {
		session_answer(tensor->session, id, failure->status, failure->text);
		/* Its number is free, as after a Release. */
		if (agent_is_void(declaration))
			undeclare(tensor->session, tensor);
		return;
	}
	declared.key = key;
	declared.part_bytes = part_bytes;
	message.id = id;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_DECLARED;
	message.declared = &declared;
	session_send(tensor->session, &message, NULL, 0);
}

void tensor_handle_declare(const struct incoming *in, const Bps__Control__Declare *m)
{
	struct agent_past past = { .rounds = m->rounds, .failed = m->failed };
	struct agent_facts facts = {
		.name = m->name,
		.dtype = m->dtype,
		.elements = m->elements,
		.shape = m->shape,
	};
	struct session *session = in->session;
	bool again = m->has_rounds || !(session->features & CONTROL_FEATURE_RELEASE);
	struct session_tensor *tensor;
	struct failure failure = { 0 };
	int r;

	if (check_declare(session, m, &failure)) {
		refuse(in, &failure);
		return;
	}
	tensor = take_tensor(session);
	r = tensor ? map_add(&session->tensors.map, m->tensor, &tensor->entry) : -errno;
	if (r) {
		(void)account_no_memory(session->account, -r, &failure);
		if (tensor)
			spare_tensor(session, tensor);
		refuse(in, &failure);
		return;
	}
	session->tensors.n++;
	tensor->session = session;
	tensor->number = m->tensor;
	tensor->element_size = dtype_size(m->dtype);
	tensor->declare_id = in->id;
	tensor->declaration.declared = on_declared;
	note_asked(tensor);
	number_tensor(session, tensor);
	if (agent_declare(&session->job.member, &tensor->declaration, &facts, again ? &past : NULL,
			  &failure)) {
		undeclare(session, tensor);
		refuse(in, &failure);
	}
}

/* -- Out of a job ------------------------------------------------------------------------------------------------- */

#define ANSWERED_STEP 64

/* Of a job that is over: those about which requests are still to be answered. */
struct past_tensors {
	struct list link; /* in session->tensors.past */
	struct bulk bulk;
	struct list asked;
	struct failure why; /* what declarations are answered; status 0: nothing */
};

/* Whether the trainer reads what it is told. */
static bool reads(const struct session *session)
{
	return session->outbox.n <= OUTBOX_MAX / 2;
}

/* At most n of them, while the trainer reads what it is told. Returns whether all were. */
static bool answer_asked(struct session *session, struct list *asked, const struct failure *why,
			 unsigned n)
{
	struct session_tensor *tensor;

	while ((tensor = list_first(asked, struct session_tensor, asked))) {
		if (!n-- || !reads(session))
			return false;
		list_remove(&tensor->asked);
		if (tensor->declare_id && why)
			session_answer(session, tensor->declare_id, why->status, why->text);
		if (tensor->release_id)
			session_answer(session, tensor->release_id, 0, NULL);
		if (tensor->keep_id)
			session_answer(session, tensor->keep_id, 0, NULL);
	}
	return true;
}

static void past_forget(struct past_tensors *past)
{
	list_remove(&past->link);
	bulk_done(&past->bulk);
	held_free(past);
}

/* Whether the trainer may be answered more. */
static bool has_more(const struct session *session)
{
	return !list_empty(&session->tensors.past) && reads(session);
}

static bool on_answer(struct chore *chore)
{
	struct session *session = container_of(chore, struct session, tensors.answering);
	struct past_tensors *past = list_first(&session->tensors.past, struct past_tensors, link);
	uint64_t began_ns = clock_now_ns();

	if (answer_asked(session, &past->asked, past->why.status ? &past->why : NULL,
			 ANSWERED_STEP))
		past_forget(past);
	session_charge_pace(session, began_ns);
	return has_more(session);
}

void session_tensors_go_on(struct session *session)
{
	if (has_more(session))
		loop_begin(session->control->params.loop, &session->tensors.answering);
}

/* What is left is answered in steps. */
static void answer_later(struct session *session, const struct failure *why)
{
	struct past_tensors *past = held_new(&session->held, sizeof(*past));

	if (!past) {
		list_init(&session->tensors.asked);
		session_fail_later(session, "no memory for the answers to its requests");
		return;
	}
	if (why)
		past->why = *why;
	past->bulk = session->tensors.bulk;
	session->tensors.bulk = (struct bulk){ .quota = past->bulk.quota };
	/* It takes the place of the other's head. */
	list_insert_before(&session->tensors.asked, &past->asked);
	list_remove(&session->tensors.asked);
	list_push_back(&session->tensors.past, &past->link);
	session_tensors_go_on(session);
}

void session_tensors_init(struct session *session)
{
	list_init(&session->tensors.asked);
	list_init(&session->tensors.past);
	session->tensors.answering.step = on_answer;
}

/* However many tensors there are, what goes is whole pieces of memory; only those with requests are looked at. */
void session_drop_tensors(struct session *session, const struct failure *why)
{
	struct session_tensors *tensors = &session->tensors;

	session->job.n_runs++;
	if (!answer_asked(session, &tensors->asked, why, ANSWERED_STEP))
		answer_later(session, why);
	map_done(&tensors->map);
	bulk_done(&tensors->bulk);
	tensors->spare = NULL;
	tensors->n = 0;
	tensors->numbered = held_free(tensors->numbered);
	tensors->n_numbered = 0;
}

void session_forget_tensors(struct session *session)
{
	struct past_tensors *past;

	while ((past = list_first(&session->tensors.past, struct past_tensors, link)))
		past_forget(past);
	loop_abort(&session->tensors.answering);
	list_init(&session->tensors.asked);
	session_drop_tensors(session, NULL);
}

static void answer_release(struct session *session, uint64_t id, bool forgotten)
{
	session_answer(session, id, forgotten ? 0 : -EBUSY,
		       forgotten ? NULL : "a rank uses the tensor");
}

static void on_unused(struct agent_declaration *declaration, const char *name)
{
	struct session_tensor *tensor =
		container_of(declaration, struct session_tensor, declaration);
	Bps__Control__Message message = BPS__CONTROL__MESSAGE__INIT;
	Bps__Control__Unused unused = BPS__CONTROL__UNUSED__INIT;

	unused.tensor = tensor->number;
	unused.name = (char *)name;
	message.body_case = BPS__CONTROL__MESSAGE__BODY_UNUSED;
	message.unused = &unused;
	session_send(tensor->session, &message, NULL, 0);
}

static void on_released(struct agent_declaration *declaration, bool forgotten)
{
	struct session_tensor *tensor =
		container_of(declaration, struct session_tensor, declaration);
	struct session *session = tensor->session;
	uint64_t id = tensor->release_id, keep_id = tensor->keep_id;

	tensor->release_id = tensor->keep_id = 0;
	note_asked(tensor);
	if (forgotten)
		undeclare(session, tensor);
	answer_release(session, id, forgotten);
	if (keep_id)
		session_answer(session, keep_id, 0, NULL);
}

/* One that is released already is kept or not: the answer to that comes first. */
static void keep(struct session_tensor *tensor, uint64_t id)
{
	agent_keep(&tensor->declaration);
	if (tensor->release_id && !tensor->keep_id)
		tensor->keep_id = id;
	else
		session_answer(tensor->session, id, 0, NULL);
}

void tensor_handle_release(const struct incoming *in, const Bps__Control__Release *m)
{
	struct session *session = in->session;
	struct map_entry *entry = map_find(&session->tensors.map, m->tensor);
	struct session_tensor *tensor =
		entry ? container_of(entry, struct session_tensor, entry) : NULL;

	if (!tensor || agent_is_void(&tensor->declaration)) {
		session_answer(session, in->id, -EINVAL, "no such tensor is declared");
	} else if (m->in_use) {
		keep(tensor, in->id);
	} else if (tensor->release_id) {
		session_answer(session, in->id, -EALREADY, "the tensor is released already");
	} else {
		tensor->release_id = in->id;
		note_asked(tensor);
		if (agent_release(&tensor->declaration)) {
			tensor->release_id = 0;
			note_asked(tensor);
			answer_release(session, in->id, false);
		}
	}
}

void tensor_set_callbacks(struct session *session)
{
	session->job.member.unused = session->features & CONTROL_FEATURE_RELEASE ? on_unused : NULL;
	session->job.member.released = on_released;
}
