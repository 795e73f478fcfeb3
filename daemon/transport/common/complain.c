/*
 * What is logged of connections that are refused, of TCP and RDMA: strangers must not fill the log.
 * Home thread.
 */
#include "transport/internal.h"

#include "base/clock.h"
#include "base/log.h"
#include <stdarg.h>
#include <stdio.h>

#define COMPLAIN_NS NSEC_PER_SEC

void transport_complain(struct transport *transport, const char *format, ...)
{
	uint64_t now_ns = clock_now_ns();
	char text[512];
	va_list args;

	if (transport->port.complained_ns && now_ns - transport->port.complained_ns < COMPLAIN_NS) {
		transport->port.n_unsaid++;
		return;
	}
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	if (transport->port.n_unsaid)
		log_warning("%s (and %u more connections refused)", text, transport->port.n_unsaid);
	else
		log_warning("%s", text);
	transport->port.complained_ns = now_ns;
	transport->port.n_unsaid = 0;
}
