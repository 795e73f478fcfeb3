/* The machine: its devices, as libc and the kernel tell of them, and what is to go wrong. */
#include "double.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
struct fake_machine fake_machine;
enum fake_wire fake_wire;
struct fake_asked fake_last;
struct fake_work fake_worked;
unsigned fake_objects;

#define CALLS 64

static struct call_count {
	const char *name;
	unsigned n, from, until; /* fails from one to before the other */
	int error;
} counts[CALLS];

_Noreturn void fake_abort(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	(void)fputs("fakeverbs: ", stderr);
	(void)vfprintf(stderr, format, args);
	(void)fputs("\n", stderr);
	va_end(args);
	abort();
}

static struct call_count *count_of(const char *name)
{
	for (unsigned i = 0; i < CALLS; i++) {
		if (!counts[i].name)
			counts[i].name = name;
		if (!strcmp(counts[i].name, name))
			return &counts[i];
	}
	fake_abort("more than %u calls", CALLS);
}

/* FAKE_FAIL: "CALL:ERRNO", a call that always fails. */
static void read_environment(void)
{
	static bool is_read;
	static char name[64];
	const char *fail = getenv("FAKE_FAIL");
	struct call_count *count;
	int error;

	if (is_read || !fail)
		return;
	is_read = true;
	if (sscanf(fail, "%63[^:]:%d", name, &error) != 2)
		fake_abort("FAKE_FAIL is not of the form CALL:ERRNO");
	count = count_of(name);
	count->until = UINT_MAX;
	count->error = error;
}

bool fake_fails(const char *call)
{
	struct call_count *count;

	read_environment();
	count = count_of(call);
	count->n++;
	if (count->n < count->from || count->n >= count->until)
		return false;
	errno = count->error;
	return true;
}

EXPORT void fake_fail(const char *call, int error, unsigned nth, unsigned times)
{
	struct call_count *count;

	pthread_mutex_lock(&fake_lock);
	count = count_of(call);
	count->from = count->n + nth;
	if (ADD_OVERFLOW(count->from, times, &count->until))
		count->until = UINT_MAX;
	count->error = error;
	pthread_mutex_unlock(&fake_lock);
}

EXPORT unsigned fake_n_calls(const char *call)
{
	unsigned n;

	pthread_mutex_lock(&fake_lock);
	n = count_of(call)->n;
	pthread_mutex_unlock(&fake_lock);
	return n;
}

static struct {
	const char *call;
	uint64_t least;
	unsigned n;
	pthread_cond_t changed;
} hold = { .changed = PTHREAD_COND_INITIALIZER };

void fake_wait(const char *call, uint64_t bytes)
{
	hold.n++;
	while (hold.call && !strcmp(hold.call, call) && bytes >= hold.least)
		pthread_cond_wait(&hold.changed, &fake_lock);
	hold.n--;
}

EXPORT void fake_hold(const char *call, uint64_t least)
{
	pthread_mutex_lock(&fake_lock);
	hold.call = call;
	hold.least = least;
	pthread_cond_broadcast(&hold.changed);
	pthread_mutex_unlock(&fake_lock);
}

EXPORT unsigned fake_n_held(void)
{
	unsigned n;

	pthread_mutex_lock(&fake_lock);
	n = hold.n;
	pthread_mutex_unlock(&fake_lock);
	return n;
}

EXPORT void fake_machine_set(const struct fake_machine *machine)
{
	pthread_mutex_lock(&fake_lock);
	fake_machine = *machine;
	pthread_mutex_unlock(&fake_lock);
}

EXPORT void fake_wire_set(enum fake_wire wire)
{
	pthread_mutex_lock(&fake_lock);
	fake_wire = wire;
	fake_wire_wake();
	pthread_mutex_unlock(&fake_lock);
}

EXPORT struct fake_asked fake_asked(void)
{
	struct fake_asked asked;

	pthread_mutex_lock(&fake_lock);
	asked = fake_last;
	pthread_mutex_unlock(&fake_lock);
	return asked;
}

EXPORT struct fake_work fake_work(void)
{
	struct fake_work work;

	pthread_mutex_lock(&fake_lock);
	work = fake_worked;
	pthread_mutex_unlock(&fake_lock);
	return work;
}

EXPORT unsigned fake_n_objects(void)
{
	unsigned n;

	pthread_mutex_lock(&fake_lock);
	n = fake_objects;
	pthread_mutex_unlock(&fake_lock);
	return n;
}

unsigned fake_n_devices(void)
{
	return fake_machine.has_none ? 0 : FAKE_DEVICES;
}

unsigned fake_mtu(unsigned device)
{
	return fake_machine.mtus[device] ?: IBV_MTU_4096;
}

/* 192.0.2.N and 2001:db8::N, which are nobody's. */
void fake_address(unsigned device, struct sockaddr_storage *ret_address)
{
	struct sockaddr_in in = {
		.sin_family = AF_INET,
		.sin_addr.s_addr = htonl(0xc0000201 + device),
	};
	struct sockaddr_in6 in6 = {
		.sin6_family = AF_INET6,
		.sin6_addr.s6_addr = { 0x20, 0x01, 0x0d, 0xb8, [15] = (uint8_t)(device + 1) },
	};

	memset(ret_address, 0, sizeof(*ret_address));
	if (fake_machine.ipv6 & (1u << device))
		memcpy(ret_address, &in6, sizeof(in6));
	else
		memcpy(ret_address, &in, sizeof(in));
}

void fake_gid(unsigned device, union ibv_gid *ret_gid)
{
	struct sockaddr_storage address;

	memset(ret_gid, 0, sizeof(*ret_gid));
	fake_address(device, &address);
	if (fake_machine.is_infiniband) {
		ret_gid->raw[0] = 0xfe;
		ret_gid->raw[1] = 0x80;
		ret_gid->raw[15] = (uint8_t)(device + 1);
	} else if (fake_machine.ipv6 & (1u << device)) {
		memcpy(ret_gid->raw, &((struct sockaddr_in6 *)&address)->sin6_addr, 16);
	} else {
		ret_gid->raw[10] = ret_gid->raw[11] = 0xff;
		memcpy(ret_gid->raw + 12, &((struct sockaddr_in *)&address)->sin_addr, 4);
	}
}

/* Libc's, as the program asks them; of a machine whose links are our devices' alone. */

typedef int real_scandir(const char *, struct dirent ***, int (*)(const struct dirent *),
			 int (*)(const struct dirent **, const struct dirent **));

EXPORT int scandir(const char *path, struct dirent ***ret_names,
		   int (*filter)(const struct dirent *),
		   int (*compare)(const struct dirent **, const struct dirent **))
{
	static const char *const names[] = { ".", "..", "fake0", "fake1" };
	int n;

	if (strcmp(path, "/sys/class/infiniband") != 0) {
		real_scandir *real = (real_scandir *)dlsym(RTLD_NEXT, "scandir");

		return real(path, ret_names, filter, compare);
	}
	pthread_mutex_lock(&fake_lock);
	n = 2 + (int)fake_n_devices();
	pthread_mutex_unlock(&fake_lock);
	*ret_names = calloc((size_t)n, sizeof(**ret_names));
	for (int i = 0; i < n; i++) {
		(*ret_names)[i] = calloc(1, sizeof(struct dirent));
		strcpy((*ret_names)[i]->d_name, names[i]);
	}
	return n;
}

struct interface {
	struct ifaddrs ifa;
	struct sockaddr_storage address;
};

static char name[] = "fake";

EXPORT int getifaddrs(struct ifaddrs **ret_all)
{
	/* lo, a link-local address, then the devices' */
	struct interface *all = calloc(2 + FAKE_DEVICES, sizeof(*all));
	struct sockaddr_in6 local = {
		.sin6_family = AF_INET6,
		.sin6_addr.s6_addr = { 0xfe, 0x80, [15] = 1 },
	};
	struct sockaddr_in loopback = {
		.sin_family = AF_INET,
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	unsigned n = 2;

	memcpy(&all[0].address, &loopback, sizeof(loopback));
	all[0].ifa.ifa_flags = IFF_UP | IFF_LOOPBACK;
	memcpy(&all[1].address, &local, sizeof(local));
	all[1].ifa.ifa_flags = IFF_UP;
	pthread_mutex_lock(&fake_lock);
	for (unsigned i = 0; i < fake_n_devices(); i++, n++) {
		fake_address(i, &all[n].address);
		all[n].ifa.ifa_flags = IFF_UP;
	}
	pthread_mutex_unlock(&fake_lock);
	for (unsigned i = 0; i < n; i++) {
		all[i].ifa.ifa_name = name;
		all[i].ifa.ifa_addr = (struct sockaddr *)&all[i].address;
		all[i].ifa.ifa_next = i + 1 < n ? &all[i + 1].ifa : NULL;
	}
	*ret_all = &all->ifa;
	return 0;
}

EXPORT void freeifaddrs(struct ifaddrs *all)
{
	free(all);
}
