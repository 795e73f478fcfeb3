/* How bpsctl shows what a daemon answered. Private to the program. */
#pragma once

#include "proto/c.h"
#include "proto/pack.h"

/* Tables and lines for people, on standard output. What came from elsewhere is shown without control characters. */
void ctl_print_status(const ProtobufCMessage *reply);
void ctl_print_nodes(const ProtobufCMessage *reply);
void ctl_print_jobs(const ProtobufCMessage *reply);
void ctl_print_job(const ProtobufCMessage *reply);
void ctl_print_metrics(const ProtobufCMessage *reply);
void ctl_print_health(const ProtobufCMessage *reply);
void ctl_print_drain(const ProtobufCMessage *reply);

/*
 * The same for programs: one object, its members named as the fields of the message. Fixed-width numbers (ids) are
 * strings of sixteen hexadecimal digits, as JSON's numbers lose bits; roles are a list of words; metrics an object of
 * numbers. Returns 0 or -ENOMEM.
 */
int ctl_print_json(const ProtobufCMessage *reply);
