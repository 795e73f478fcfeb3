/* libibverbs.so.1 has nothing of its own: what is looked up in it is found in the library that it needs. */
#include <infiniband/verbs.h>

__attribute__((visibility("default")))
const char *(*const fake_needs)(struct ibv_device *) = ibv_get_device_name;
