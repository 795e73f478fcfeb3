/*
 * The quota of a job, which is kept for another job and never freed: a data thread may be about
 * to release the last charge when the job goes. job.c takes and gives.
 */
#include "server/job/job.h"

#include <pthread.h>

/* Of contributions, which are many; a job may have nearly two batches more of the daemon's memory than it needs. */
#define JOB_QUOTA_BATCH (UINT64_C(16) << 10)

struct job_quota {
	struct quota quota;
	struct list link; /* in spare while no job has it */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards spare */
static struct list spare = LIST_INIT(spare);

/*
 * The last release of a charge still goes to quota->parent after it has brought used to 0: the
 * parent stays, since nothing but the limit is written here. The last release gives back what is left of batches, too, which by then may be another job's.
 */
struct quota *job_quota_take(uint64_t limit, struct quota *parent)
{
	struct job_quota *found = NULL, *q;

	(void)pthread_mutex_lock(&lock);
	list_for_each (q, &spare, link) {
		if (q->quota.parent == parent && !quota_used(&q->quota)) {
			found = q;
			list_remove(&q->link);
			break;
		}
	}
	(void)pthread_mutex_unlock(&lock);
	if (!found) {
		found = calloc(1, sizeof(*found));
		if (!found)
			return NULL;
		quota_init(&found->quota, limit, parent);
		found->quota.batch = JOB_QUOTA_BATCH;
	}
	found->quota.limit = limit;
	return &found->quota;
}

void job_quota_give(struct quota *quota)
{
	struct job_quota *q;

	if (!quota)
		return;
	q = container_of(quota, struct job_quota, quota);
	(void)pthread_mutex_lock(&lock);
	list_push_back(&spare, &q->link);
	(void)pthread_mutex_unlock(&lock);
}
