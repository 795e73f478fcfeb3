/*
 * What is urgent alike. Private to agent/.
 */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How urgent a tensor is among those of its job. */
struct priority_class {
	int32_t priority; /* as its trainers say; a larger one is more urgent */
	int32_t priority_class; /* the largest priority of those that go with it in the order of submission */
	uint64_t bytes; /* of one contribution */
	uint32_t
		urgent_pass; /* of its job, from 1: in which it last came as one of the most urgent; 0: in none */
	bool known; /* a round of it has begun */
};

/* Finds the priority_class of each tensor. Sorts the array. */
void priority_class_make(struct priority_class **classes, size_t n);
