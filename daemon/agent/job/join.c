/*
 * What a rank says when it joins: checked in itself, its secret made a digest, and compared with
 * what the job's other ranks have said. job.c and resume.c call.
 */
#include "agent/job/job.h"
#include "base/log.h"
#include <endian.h>
#include <openssl/evp.h>

static bool name_valid(const char *name)
{
	size_t len = strlen(name);

	return len && len <= JOB_NAME_MAX &&
	       strspn(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-") ==
		       len;
}

static int check_numbers(const struct agent_join *j, struct failure *failure)
{
	if (j->newcomer)
		return 0;
	if (!j->size || j->size > JOB_RANKS_MAX)
		return failure_set(failure, -EINVAL, "size %u is not within 1 to %u", j->size,
				   JOB_RANKS_MAX);
	if (j->rank >= j->size)
		return failure_set(failure, -EINVAL, "rank %u, but size is %u", j->rank, j->size);
	if (!j->n_nodes || j->n_nodes > j->size || j->node >= j->n_nodes)
		return failure_set(failure, -EINVAL, "rank %u: node %u of %u, with size %u",
				   j->rank, j->node, j->n_nodes, j->size);
	if (!j->local_size || j->local_rank >= j->local_size)
		return failure_set(failure, -EINVAL, "rank %u: local rank %u, but local size is %u",
				   j->rank, j->local_rank, j->local_size);
	/* Every other node has at least one rank; one node has them all. */
	if (j->local_size > j->size - (j->n_nodes - 1) ||
	    (j->n_nodes == 1 && j->local_size != j->size))
		return failure_set(failure, -EINVAL,
				   "rank %u: local size %u does not fit size %u on %u nodes",
				   j->rank, j->local_size, j->size, j->n_nodes);
	if (j->part_bytes && (j->part_bytes < PART_BYTES_MIN || j->part_bytes > PART_BYTES_MAX))
		return failure_set(failure, -EINVAL, "rank %u: part size %u is not within %u to %u",
				   j->rank, j->part_bytes, PART_BYTES_MIN, PART_BYTES_MAX);
	if (j->gpu_reduce > GPU_REDUCE_MAX_)
		return failure_set(failure, -EINVAL,
				   "rank %u: %u is no way to reduce GPUs, which are 0 to %d",
				   j->rank, j->gpu_reduce, GPU_REDUCE_MAX_);
	if (j->local_size < 64 && j->gpu_roots >> j->local_size)
		return failure_set(failure, -EINVAL,
				   "rank %u: GPUs of local rank %d are to be roots, of %u", j->rank,
				   63 - __builtin_clzll(j->gpu_roots), j->local_size);
	if (j->stragglers.quorum > j->size)
		return failure_set(failure, -EINVAL, "rank %u: a quorum of %u, but size is %u",
				   j->rank, j->stragglers.quorum, j->size);
	if ((j->stragglers.quorum_timeout_ms && !j->stragglers.quorum) ||
	    (j->stragglers.staleness && !stragglers_any(&j->stragglers)))
		return failure_set(failure, -EINVAL,
				   "rank %u: how late ranks may be, in a job that waits for them",
				   j->rank);
	return 0;
}

static int check_elastic(const struct agent_join *j, struct failure *failure)
{
	if (j->elastic && (!j->min_ranks || j->min_ranks > JOB_RANKS_MAX ||
			   (j->max_ranks && j->max_ranks < j->min_ranks)))
		return failure_set(failure, -EINVAL,
				   "rank %u: an elastic job of %u to %u ranks is none", j->rank,
				   j->min_ranks, j->max_ranks);
	if (j->elastic && !j->newcomer &&
	    (j->size < j->min_ranks || (j->max_ranks && j->size > j->max_ranks)))
		return failure_set(
			failure, -EINVAL,
			"rank %u: size %u is not within %u to %u, which the elastic job may have",
			j->rank, j->size, j->min_ranks, j->max_ranks);
	if (j->elastic && stragglers_any(&j->stragglers))
		return failure_set(failure, -EINVAL,
				   "rank %u: a job that is elastic waits for all its ranks: it has "
				   "no quorum and no async",
				   j->rank);
	if (j->newcomer && !j->elastic)
		return failure_set(failure, -EINVAL, "a newcomer, but the job is not elastic");
	return 0;
}

int agent_join_check(const struct agent_join *join, struct failure *failure)
{
	int r;

	if (!name_valid(join->job))
		return failure_set(failure, -EINVAL,
				   "the name of a job is 1 to %d of A-Z a-z 0-9 . _ -",
				   JOB_NAME_MAX);
	if (join->secret_len > JOB_SECRET_MAX)
		return failure_set(failure, -EINVAL, "a secret of %zu bytes, more than %d",
				   join->secret_len, JOB_SECRET_MAX);
	r = check_elastic(join, failure);
	return r ? r : check_numbers(join, failure);
}

int agent_join_digest(struct agent_join *join)
{
	/* A secret cannot be chosen to be what stands for a user: the labels differ. */
	const char *label = join->secret_len ? "bps-job" : "bps-user";
	uint32_t uid = htole32(join->uid);
	const void *owner = join->secret_len ? join->secret : &uid;
	EVP_MD_CTX *context = EVP_MD_CTX_new();
	bool good;

	if (!context)
		return error_origin(-ENOMEM);
	good = EVP_DigestInit_ex(context, EVP_sha256(), NULL) &&
	       EVP_DigestUpdate(context, label, strlen(label)) &&
	       EVP_DigestUpdate(context, join->job, strlen(join->job) + 1) &&
	       EVP_DigestUpdate(context, owner, join->secret_len ?: sizeof(uid)) &&
	       EVP_DigestFinal_ex(context, join->secret_digest, NULL);
	EVP_MD_CTX_free(context);
	return good ? 0 : error_origin(-ENOMEM);
}

static int differ(struct failure *failure, const char *what, const struct agent_member *other,
		  uint64_t theirs, const struct agent_join *join, uint64_t ours)
{
	return failure_set(failure, -EINVAL, "job %s: rank %u says %s %llu, rank %u says %llu",
			   join->job, other->rank, what, (unsigned long long)theirs, join->rank,
			   (unsigned long long)ours);
}

static int compare_stragglers(const struct agent_shape *shape, const struct agent_member *other,
			      const struct agent_join *join, struct failure *failure)
{
	const struct stragglers *a = &shape->stragglers, *b = &join->stragglers;

	if (a->quorum != b->quorum)
		return differ(failure, "quorum", other, a->quorum, join, b->quorum);
	if (a->quorum_timeout_ms != b->quorum_timeout_ms)
		return differ(failure, "quorum timeout", other, a->quorum_timeout_ms, join,
			      b->quorum_timeout_ms);
	if (a->async != b->async)
		return differ(failure, "async", other, a->async, join, b->async);
	if (a->staleness != b->staleness)
		return differ(failure, "staleness", other, a->staleness, join, b->staleness);
	return 0;
}

static int compare_shape(const struct agent_job *job, const struct agent_member *other,
			 const struct agent_join *join, struct failure *failure)
{
	const struct agent_shape *shape = &job->shape;
	int r;

	r = compare_stragglers(shape, other, join, failure);
	if (r)
		return r;
	if (shape->size != join->size)
		return differ(failure, "size", other, shape->size, join, join->size);
	if (shape->n_nodes != join->n_nodes)
		return differ(failure, "nodes", other, shape->n_nodes, join, join->n_nodes);
	if (shape->node != join->node)
		return differ(failure, "node", other, shape->node, join, join->node);
	if (shape->local_size != join->local_size)
		return differ(failure, "local size", other, shape->local_size, join,
			      join->local_size);
	if (shape->part_bytes != join->part_bytes)
		return differ(failure, "part size", other, shape->part_bytes, join,
			      join->part_bytes);
	if (shape->min_servers != join->min_servers)
		return differ(failure, "servers", other, shape->min_servers, join,
			      join->min_servers);
	if (shape->request_timeout_ms != join->request_timeout_ms)
		return differ(failure, "request timeout", other, shape->request_timeout_ms, join,
			      join->request_timeout_ms);
	/* Of an elastic job it is the daemon that knows, once ranks have regrouped. */
	if (!shape->elastic && shape->force_distributed != join->force_distributed)
		return differ(failure, "force_distributed", other, shape->force_distributed, join,
			      join->force_distributed);
	if (shape->gpu_reduce != join->gpu_reduce)
		return differ(failure, "reduction of GPUs", other, shape->gpu_reduce, join,
			      join->gpu_reduce);
	if (shape->gpu_roots != join->gpu_roots)
		return differ(failure, "roots of GPUs, as bits,", other, shape->gpu_roots, join,
			      join->gpu_roots);
	if (shape->elastic != join->elastic)
		return differ(failure, "elastic", other, shape->elastic, join, join->elastic);
	if (shape->min_ranks != join->min_ranks)
		return differ(failure, "at least ranks", other, shape->min_ranks, join,
			      join->min_ranks);
	if (shape->max_ranks != join->max_ranks)
		return differ(failure, "at most ranks", other, shape->max_ranks, join,
			      join->max_ranks);
	return 0;
}

int agent_join_compare(const struct agent_job *job, const struct agent_join *join,
		       struct failure *failure)
{
	int r;

	if (!agent_job_is(job, join->job, join->secret_digest))
		return failure_set(failure, -EACCES, "job %s: wrong secret", join->job);

	for (uint32_t i = 0; i < job->shape.local_size; i++) {
		const struct agent_member *other = job->members[i];

		if (!other)
			continue;
		if (other->rank == join->rank)
			return failure_set(failure, -EEXIST,
					   "job %s: rank %u is taken already, by pid %u", join->job,
					   join->rank, other->process.pid);
		r = compare_shape(job, other, join, failure);
		if (r)
			return r;
		if (other->local_rank == join->local_rank)
			return failure_set(failure, -EEXIST,
					   "job %s: rank %u and rank %u both say local rank %u",
					   join->job, other->rank, join->rank, join->local_rank);
	}
	return 0;
}
