/* Which nodes a part concerns, by its operation and block. Pure functions of a header and the job's layout. */
#pragma once

#include "server/job/job.h"

/* Root and block exist for this operation. Returns 0, or -EINVAL with failure filled. */
int set_check(const struct job *job, const struct data_header *header, struct failure *failure);
/* Whether the node takes part, brings the part's data, and is given the result's. After set_check(). */
bool set_has(const struct job *job, const struct data_header *header, uint32_t node);
bool set_gives(const struct job *job, const struct data_header *header, uint32_t node);
bool set_wants(const struct job *job, const struct data_header *header, uint32_t node);
/* Whether the node that brings the data is still in the job. */
bool set_is_possible(const struct job *job, const struct data_header *header);
uint32_t set_count(const struct job *job, const struct data_header *header);
/* Data is reduced, not moved. */
bool set_reduces(const struct data_header *header);
