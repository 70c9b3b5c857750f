/* A stand-in for libcudart: memory is counted in the card's ledger, kernels are launched and do nothing.
 *
 * What is not defined here is made by stubs.py, and answers cudaSuccess. */

#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "card.h"

static __thread cudaError_t last_error;
static atomic_int is_broken;
static _Atomic u64 next_handle = 0x1000;

static cudaError_t fail(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

static void *new_handle(void) { return (void *)++next_handle; }

/* Errors and versions */

/* Fail from now on as a card does after a kernel has read outside its memory: each launch and copy reports it. */
void card_break(void) { is_broken = 1; }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = is_broken ? cudaErrorIllegalAddress : last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return is_broken ? cudaErrorIllegalAddress : last_error; }
const char *cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorNoDevice) return "no CUDA-capable device is detected";
  if (error == cudaErrorInvalidDevice) return "invalid device ordinal";
  if (error == cudaErrorIllegalAddress) return "an illegal memory access was encountered";
  return error ? "an error of the stand-in card" : "no error";
}
const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : error ? "cudaErrorUnknown" : "cudaSuccess";
}
cudaError_t cudaDriverGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) {
  *count = card_count();
  return *count ? cudaSuccess : fail(cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *device) { return *device = card_current(), cudaSuccess; }
cudaError_t cudaSetDevice(int device) {
  if (card_of(device) < 0) return fail(cudaErrorInvalidDevice);
  card_select(device);
  return fail(card_enter(device)); /* since CUDA 12 this makes the context */
}
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, (size_t)size, "0000:%02x:00.0", card_of(device) + 1);
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { return *can = 0, cudaSuccess; }
cudaError_t cudaDeviceGetLimit(size_t *value, enum cudaLimit limit) { return *value = 1024, cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
  size_t free_bytes;
  if (card_of(device) < 0) return fail(cudaErrorInvalidDevice);
  memset(properties, 0, sizeof *properties);
  card_info(device, &free_bytes, &properties->totalGlobalMem);
  strcpy(properties->name, "NVIDIA H100 80GB HBM3");
  static const unsigned char uuid[16] = {0x5c, 0xa1, 0xab, 0x1e, 0, 0, 0x40, 0, 0x80};
  memcpy(properties->uuid.bytes, uuid, sizeof uuid);
  properties->uuid.bytes[15] = (char)card_of(device);
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->maxBlocksPerMultiProcessor = 32;  // torch.topk divides by it
  properties->l2CacheSize = 50 << 20;
  properties->memoryBusWidth = 5120;
  properties->totalConstMem = 65536;
  properties->textureAlignment = 512;
  properties->memPitch = 2147483647;
  properties->unifiedAddressing = properties->concurrentKernels = 1;
  properties->asyncEngineCount = 3;
  properties->pciBusID = card_of(device) + 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
  static const struct { int attribute, value; } known[] = {
    {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrWarpSize, 32},
    {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrMaxBlocksPerMultiprocessor, 32}, {cudaDevAttrMaxRegistersPerBlock, 65536},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
    {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024}, {cudaDevAttrMaxBlockDimZ, 64},
    {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535}, {cudaDevAttrMaxGridDimZ, 65535}, /* without: cub loops */
    {cudaDevAttrL2CacheSize, 50 << 20}, {cudaDevAttrClockRate, 1980000}, {cudaDevAttrUnifiedAddressing, 1},
    {cudaDevAttrConcurrentKernels, 1}, {cudaDevAttrCanMapHostMemory, 1}, {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrManagedMemory, 1},
  };
  *value = 0;
  for (size_t i = 0; i < sizeof known / sizeof *known; i++)
    if (known[i].attribute == (int)attribute) *value = known[i].value;
  return cudaSuccess;
}

/* Device memory */

cudaError_t cudaMalloc(void **address, size_t size) {
  size_t rounded = (size + CARD_GRAIN - 1) & ~(CARD_GRAIN - 1); /* a card gives whole pages of 2 MiB */
  *address = NULL;
  cudaError_t error = card_claim(card_current(), (long long)rounded);
  if (error) return fail(error);
  *address = card_reserve(rounded ? rounded : CARD_GRAIN);
  if (*address) {
    card_remember((Region){.start = *address, .size = rounded, .kind = REGION_DEVICE, .ordinal = card_current()});
    return cudaSuccess;
  }
  card_claim(card_current(), -(long long)rounded);
  return fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *address) {
  Region region;
  if (!address) return fail(card_enter(card_current())); /* the customary way to make a context */
  if (!card_forget(address, &region)) return fail(cudaErrorInvalidValue);
  munmap(region.start, region.size);
  return card_claim(region.ordinal, -(long long)region.size);
}
cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) { return cudaMalloc(address, size); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
  cudaError_t error = card_enter(card_current());
  if (!error) card_info(card_current(), free_bytes, total_bytes);
  return fail(error);
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  Region region;
  memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  if (!card_find(address, &region)) return cudaSuccess;
  int on_host = region.kind == REGION_HOST || region.kind == REGION_REGISTERED;
  attributes->type = on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = region.ordinal;
  attributes->devicePointer = (void *)address;
  attributes->hostPointer = on_host ? (void *)address : NULL;
  return cudaSuccess;
}

/* Copies are real; a large fill with zeros gives the pages back */

static cudaError_t copy(void *to, const void *from, size_t size) {
  if (is_broken) return fail(cudaErrorIllegalAddress);
  return memmove(to, from, size), cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { return copy(to, from, size); }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, size);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int device, const void *from, int source, size_t size, cudaStream_t stream) {
  return copy(to, from, size);
}
cudaError_t cudaMemset(void *start, int value, size_t size) {
  size_t aligned = ((u64)start + 4095) & ~4095ul, end = ((u64)start + size) & ~4095ul;
  if (value || end < aligned + (1 << 20)) return memset(start, value, size), cudaSuccess;
  memset(start, 0, aligned - (u64)start);
  madvise((void *)aligned, end - aligned, MADV_DONTNEED);
  memset((void *)end, 0, (u64)start + size - end);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *start, int value, size_t size, cudaStream_t stream) { return cudaMemset(start, value, size); }

/* Pinned host memory */

cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) {
  *address = mmap(0, size + !size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*address == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  card_remember((Region){.start = *address, .size = size + !size, .kind = REGION_HOST, .ordinal = card_current()});
  return cudaSuccess;
}
cudaError_t cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }
cudaError_t cudaFreeHost(void *address) {
  Region region;
  if (address && card_forget(address, &region)) munmap(region.start, region.size);
  return cudaSuccess;
}
cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
  card_remember((Region){.start = address, .size = size, .kind = REGION_REGISTERED, .ordinal = card_current()});
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
  Region region;
  return card_forget(address, &region) ? cudaSuccess : fail(cudaErrorInvalidValue);
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { return *device = host, cudaSuccess; }
cudaError_t cudaHostGetFlags(unsigned *flags, void *host) { return *flags = 0, cudaSuccess; }

/* Memory of another process: an address of its own, since nothing is computed; the bytes stay with their owner */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) {
  Region region;
  if (!card_find(address, &region)) return fail(cudaErrorInvalidValue);
  memset(handle, 0, sizeof *handle);
  memcpy(handle->reserved, &region.size, sizeof region.size);
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned flags) {
  size_t size;
  memcpy(&size, handle.reserved, sizeof size);
  *address = card_reserve(size);
  if (!*address) return fail(cudaErrorMemoryAllocation);
  card_remember((Region){.start = *address, .size = size, .kind = REGION_MAPPED, .ordinal = card_current()});
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void *address) {
  Region region;
  if (!card_forget(address, &region)) return fail(cudaErrorInvalidValue);
  munmap(region.start, region.size);
  return cudaSuccess;
}

/* Streams, events, kernels */

cudaError_t cudaStreamCreate(cudaStream_t *stream) { return *stream = new_handle(), fail(card_enter(card_current())); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
cudaError_t cudaEventCreate(cudaEvent_t *event) { return *event = new_handle(), cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { return cudaEventCreate(event); }
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) { return *milliseconds = 1, cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared,
                                                                   unsigned flags) {
  return *blocks = 2, cudaSuccess;
}
cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *function) { return *kernel = (cudaKernel_t)function, cudaSuccess; }
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function) { return cudaGetKernel(kernel, function); }
void **__cudaRegisterFatBinary(void *binary) {
  static void *registered[4];
  return registered;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) { return cudaSuccess; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) { return 0; }

/* Graphs: a stream knows that it is captured; a graph holds what torch allocated for it and nothing more */

static _Atomic(cudaStream_t) captured;
static _Atomic u64 capture_id = 1;
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  captured = stream;
  capture_id++;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  captured = NULL;
  *graph = new_handle();
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = captured && stream == captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count) {
  if (id) *id = capture_id;
  if (graph) *graph = (cudaGraph_t)1;
  if (nodes) *nodes = NULL;
  if (edges) *edges = NULL;
  if (count) *count = 0;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *instance, cudaGraph_t graph, unsigned long long flags) {
  return *instance = new_handle(), cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *instance, cudaGraph_t graph, unsigned long long flags) {
  return cudaGraphInstantiate(instance, graph, flags);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
  if (count) *count = 1; /* torch warns of an empty graph */
  return cudaSuccess;
}

/* The driver, for those who look its functions up by name */

static cudaError_t look_up(const char *name, void **function, enum cudaDriverEntryPointQueryResult *result) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, name) : NULL;
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
  return look_up(name, function, result);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  return look_up(name, function, result);
}
