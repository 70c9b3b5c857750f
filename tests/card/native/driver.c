/* A stand-in for libcuda: contexts, and memory by handles (sleep mode, expandable segments), in the card's ledger.
 *
 * What is not defined here is made by stubs.py, and answers CUDA_SUCCESS. The card is libcudart's: a driver without a
 * runtime beside it has no card. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "card.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, NOT_SUPPORTED = 801 };
typedef int Result;

/* The primary context of a device is its ordinal, plus one, since none is NULL. */
static void *context_of(int ordinal) { return (void *)(u64)(ordinal + 1); }

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { return *version = 13000, SUCCESS; }
Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, SUCCESS; }
Result cuDeviceGetCount(int *count) { return *count = card_count(), SUCCESS; }
Result cuDeviceGetName(char *name, int size, int device) { return snprintf(name, (size_t)size, "NVIDIA H100 80GB HBM3"), SUCCESS; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  int (*ask)(int *, int, int) = dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute"); /* the numbers are the same */
  if (attribute == 102 || attribute == 103) return *value = 1, SUCCESS; /* virtual memory management, its handles */
  return ask(value, attribute, device);
}
Result cuDeviceTotalMem_v2(size_t *bytes, int device) {
  size_t free_bytes;
  return card_info(device, &free_bytes, bytes), SUCCESS;
}
Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, SUCCESS; }
Result cuDevicePrimaryCtxRetain(void **context, int device) { return *context = context_of(device), card_enter(device); }
Result cuCtxGetCurrent(void **context) { return *context = context_of(card_current()), SUCCESS; }
Result cuCtxGetDevice(int *device) { return *device = card_current(), SUCCESS; }
Result cuCtxSetCurrent(void *context) {
  if (context) card_select((int)(u64)context - 1);
  return SUCCESS;
}
Result cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
Result cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : SUCCESS; }
Result cuGetErrorString(Result error, const char **text) {
  *text = error == OUT_OF_MEMORY ? "out of memory" : error ? "an error of the stand-in card" : "no error";
  return SUCCESS;
}
Result cuGetErrorName(Result error, const char **text) {
  *text = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error ? "CUDA_ERROR_UNKNOWN" : "CUDA_SUCCESS";
  return SUCCESS;
}

/* Memory by handles: it is held from cuMemCreate on until it is neither mapped nor has a handle */

typedef struct { size_t size; int ordinal, holds; } Memory;
typedef struct { int type, handle_types, location_type, location_id; } Properties; /* the head of CUmemAllocationProp */

static void let_go(Memory *memory) {
  if (--memory->holds) return;
  card_claim(memory->ordinal, -(long long)memory->size);
  free(memory);
}
Result cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { return *bytes = CARD_GRAIN, SUCCESS; }
Result cuMemCreate(u64 *handle, size_t size, const Properties *properties, u64 flags) {
  int error = card_claim(properties->location_id, (long long)size);
  if (error) return error;
  Memory *memory = malloc(sizeof *memory);
  *memory = (Memory){.size = size, .ordinal = properties->location_id, .holds = 1};
  *handle = (u64)memory;
  return SUCCESS;
}
Result cuMemRelease(u64 handle) { return let_go((Memory *)handle), SUCCESS; }
Result cuMemAddressReserve(u64 *address, size_t size, size_t alignment, u64 wanted, u64 flags) {
  *address = (u64)card_reserve(size);
  return *address ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemAddressFree(u64 address, size_t size) { return munmap((void *)address, size), SUCCESS; }
Result cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
  Memory *memory = (Memory *)handle;
  memory->holds++;
  card_remember((Region){.start = (char *)address, .size = size, .kind = REGION_MAPPED, .ordinal = memory->ordinal, .handle = memory});
  return SUCCESS;
}
Result cuMemUnmap(u64 address, size_t size) {
  Region region;
  for (u64 at = address; at < address + size; at += region.size) {
    if (!card_forget((void *)at, &region)) return INVALID_VALUE;
    madvise(region.start, region.size, MADV_DONTNEED);
    let_go(region.handle);
  }
  return SUCCESS;
}
Result cuMemSetAccess(u64 address, size_t size, const void *access, size_t count) { return SUCCESS; }
Result cuMemExportToShareableHandle(void *shareable, u64 handle, int type, u64 flags) { return NOT_SUPPORTED; }
Result cuMemAlloc_v2(u64 *address, size_t size) {
  int (*allocate)(void **, size_t) = dlsym(RTLD_DEFAULT, "cudaMalloc");
  return allocate((void **)address, size);
}
Result cuMemFree_v2(u64 address) {
  int (*release)(void *) = dlsym(RTLD_DEFAULT, "cudaFree");
  return release((void *)address);
}
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) { return card_info(card_current(), free_bytes, total_bytes), SUCCESS; }
Result cuPointerGetAttribute(void *value, int attribute, u64 address) {
  Region region;
  int known = card_find((void *)address, &region);
  if (attribute == 1) *(void **)value = context_of(known ? region.ordinal : 0);
  else if (attribute == 2) *(int *)value = known && (region.kind == REGION_HOST || region.kind == REGION_REGISTERED) ? 1 : 2;
  else if (attribute == 3 || attribute == 4) *(u64 *)value = address;
  else if (attribute == 9) *(int *)value = known ? region.ordinal : 0;
  else *(int *)value = 0;
  return SUCCESS;
}

/* Modules and kernels: there is one, and it does nothing */

static int only;
Result cuModuleLoadData(void **module, const void *image) { return *module = &only, SUCCESS; }
Result cuModuleLoadDataEx(void **module, const void *image, unsigned count, void *options, void **values) { return *module = &only, SUCCESS; }
Result cuModuleGetFunction(void **function, void *module, const char *name) { return *function = &only, SUCCESS; }
Result cuLibraryLoadData(void **library) { return *library = &only, SUCCESS; }
Result cuLibraryGetKernel(void **kernel) { return *kernel = &only, SUCCESS; }
Result cuKernelGetFunction(void **function) { return *function = &only, SUCCESS; }
Result cuFuncGetAttribute(int *value, int attribute, void *function) {
  return *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, SUCCESS; /* threads a block, registers */
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { return *blocks = 2, SUCCESS; }
Result cuOccupancyMaxActiveClusters(int *clusters) { return *clusters = 16, SUCCESS; }
Result cuStreamIsCapturing(void *stream, int *status) {
  int (*ask)(void *, int *) = dlsym(RTLD_DEFAULT, "cudaStreamIsCapturing");
  return ask(stream, status);
}

static Result look_up(const char *name, void **function) {
  *function = dlsym(RTLD_DEFAULT, name);
  return *function ? SUCCESS : NOT_FOUND;
}
Result cuGetProcAddress(const char *name, void **function, int version, u64 flags) { return look_up(name, function); }
Result cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *status) {
  Result result = look_up(name, function);
  if (status) *status = result ? 1 : 0;
  return result;
}
