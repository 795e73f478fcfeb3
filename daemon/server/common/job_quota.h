/*
 * The quota of a job's contributions and results. Any thread.
 *
 * Quotas outlive their jobs: a result may still be on its way to a node, held by transport/, when the job and even the
 * server are gone. So they are never freed but used again by a later job, once nothing is charged any more. Any thread.
 */
#pragma once

#include <stdint.h>

struct quota;

struct quota *job_quota_take(uint64_t limit, struct quota *parent);
void job_quota_give(struct quota *quota);
