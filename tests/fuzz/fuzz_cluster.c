/* What daemons and bpsctl send to each other. The first byte chooses the message. */
#include "admin.pb-c.h"
#include "cluster.pb-c.h"
#include "fuzz_pack.h"

static const ProtobufCMessageDescriptor *const messages[] = {
	&bps__cluster__job_join__descriptor,	    &bps__cluster__job_joined__descriptor,
	&bps__cluster__job_attach__descriptor,	    &bps__cluster__tensor_declare__descriptor,
	&bps__cluster__tensor_declared__descriptor, &bps__cluster__register_request__descriptor,
	&bps__cluster__register_event__descriptor,  &bps__cluster__heartbeat_request__descriptor,
	&bps__cluster__heartbeat_reply__descriptor, &bps__cluster__open_job_request__descriptor,
	&bps__cluster__open_job_reply__descriptor,  &bps__cluster__close_job_request__descriptor,
	&bps__cluster__leave_request__descriptor,   &bps__admin__status_reply__descriptor,
	&bps__admin__nodes_reply__descriptor,	    &bps__admin__jobs_reply__descriptor,
	&bps__admin__job_request__descriptor,	    &bps__admin__job_reply__descriptor,
	&bps__admin__metrics_reply__descriptor,
};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size)
		fuzz_unpack(messages[data[0] % ARRAY_SIZE(messages)], data + 1, size - 1);
	return 0;
}
