// A CUDA driver for tests, without devices: it serves the CUDA version that FAKE_CUDA_VERSION says (12040 is 12.4), and
// starting it fails with CUDA_ERROR_NO_DEVICE. Built as libcuda.so.1 and found by LD_LIBRARY_PATH.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>

enum { kNoDevice = 100, kNotFound = 500 };

static int refuse(void) { return kNotFound; }

int cuInit(unsigned flags) {
  (void)flags;
  return kNoDevice;
}

int cuDriverGetVersion(int* version) {
  *version = atoi(getenv("FAKE_CUDA_VERSION"));
  return 0;
}

int cuGetExportTable(const void** table, const void* id) {
  (void)id;
  *table = NULL;
  return kNotFound;
}

// The runtime asks for all that it may call, and wants to be given something for each.
int cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  (void)version, (void)flags;
  *function = dlsym(dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD), name);
  if (*function == NULL) *function = (void*)refuse;
  if (status != NULL) *status = 0;
  return 0;
}

int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
