/* A stand-in for libnvidia-ml.so.1 that says what a control file says.
 *
 * The file is named by NVML_FAKE_FILE when NVML is initialised first, and read again whenever it was replaced (write a
 * new one and rename it over the old one). One fact a line, the first word names it; lines after `gpu` or `instance`
 * belong to that device; a fact that is not there is answered with NOT_SUPPORTED.
 *
 *   driver 580.95.05                          global facts come before the first gpu
 *   ledger PATH                               memory used and processes of GPU n are those of card n there (tests/card)
 *   calls PATH                                append "FUNCTION UUID" there for every call ("-" without a device)
 *   error nvmlInitWithFlags 9                 this function returns this code, on every device
 *   hang nvmlEventSetWait_v2 30               this function takes so many seconds, or until the line is gone
 *   gpu GPU-1111                              NVML index 0, and so on; a GPU left out of the file later is lost
 *   name NVIDIA H100 80GB HBM3
 *   memory TOTAL USED RESERVED                bytes; used without reserved, as in memory info v2
 *   utilization 37                            per cent
 *   temperature 41                            degrees Celsius
 *   power 212500                              milliwatts
 *   process 4242 1073741824                   pid and bytes, or N/A
 *   client 4243 1073741824                    the same of a client of MPS
 *   ecc 1 0                                   ECC is on, and off from the next reset on
 *   rows 1 0                                  row remapping: one is pending, none has failed
 *   pages 1                                   retired pages are pending
 *   error nvmlDeviceGetPowerUsage 3           as above, on this device and its instances; `all` means every function
 *   hang nvmlDeviceGetMemoryInfo_v2 30        the same
 *   xid 79                                    one event per line: append a line to raise it (`xid 43 2`: instance 2)
 *   mig on                                    or off; without it MIG is not supported
 *   instance MIG-2222 1                       a MIG instance of this GPU and its GPU instance id
 *
 * Built with -DNO_V2 it lacks nvmlDeviceGetMemoryInfo_v2, as drivers before 510 do. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "ledger.h"

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       TIMEOUT = 10, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25 };
enum { MAX_DEVICES = 128, MAX_FAULTS = 16, MAX_PROCESSES = 64, MAX_XIDS = 256, TEXT = 96 };
#define ANY_INSTANCE 0xFFFFFFFFu
#define NOT_AVAILABLE 0xFFFFFFFFFFFFFFFFull
#define MEMORY_V2 0x02000028u
#define XID_CRITICAL 8ull

typedef unsigned long long u64;
typedef struct { char function[TEXT]; double value; } Fault;
typedef struct { Fault list[MAX_FAULTS]; int count; } Faults;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } ProcessInfo;
typedef struct { unsigned pid; u64 used; } ProcessInfoV1;
typedef struct { ProcessInfo list[MAX_PROCESSES]; int count; } Processes;
typedef struct { u64 total, free, used; } MemoryV1;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned gpu, memory; } Utilization;

typedef struct Device {
  char uuid[TEXT], name[TEXT];
  struct Device *parent;
  int live, has_memory, utilization, temperature, power, mig, xid_count;
  int ecc, ecc_pending, rows_pending, rows_failed, pages_pending, linked;
  unsigned gpu_instance, xids[MAX_XIDS], xid_instances[MAX_XIDS];
  u64 total, used, reserved;
  Processes processes, clients;
  Faults errors, hangs;
  int registered, delivered;
} Device;

typedef struct { Device *device; u64 type, data; unsigned gpu_instance, compute_instance; } EventData;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char control[4096], call_log[4096], driver[TEXT];
static struct stat read_as;
static Device devices[MAX_DEVICES]; /* a device keeps its place, so that a handle outlives its device */
static Device *gpus[MAX_DEVICES], *instances[MAX_DEVICES];
static int device_count, gpu_count, instance_count, initialised;
static Faults global_errors, global_hangs;
static Ledger *ledger;

static void forget_facts(Device *device) {
  device->live = device->has_memory = device->processes.count = device->clients.count = device->xid_count = 0;
  device->utilization = device->temperature = device->power = device->mig = -1;
  device->ecc = device->rows_pending = device->pages_pending = device->linked = -1;
  device->errors.count = device->hangs.count = 0;
  device->name[0] = 0;
}

static Device *device_of(const char *uuid) {
  for (int i = 0; i < device_count; i++)
    if (!strcmp(devices[i].uuid, uuid)) return &devices[i];
  if (device_count == MAX_DEVICES) abort();
  Device *device = &devices[device_count++];
  snprintf(device->uuid, TEXT, "%s", uuid);
  forget_facts(device);
  return device;
}

static Device *listed(const char *uuid, Device *parent) {
  Device *device = device_of(uuid);
  device->live = 1;
  device->parent = parent;
  return device;
}

static void add_fault(Faults *faults, const char *text) {
  Fault *fault = &faults->list[faults->count];
  if (faults->count < MAX_FAULTS && sscanf(text, "%95s %lf", fault->function, &fault->value) == 2) faults->count++;
}

static void add_process(Processes *processes, const char *text) {
  if (processes->count == MAX_PROCESSES) return;
  ProcessInfo *process = &processes->list[processes->count++];
  process->used = NOT_AVAILABLE;
  process->gpu_instance = process->compute_instance = ANY_INSTANCE;
  sscanf(text, "%u %llu", &process->pid, &process->used);
}

static void add_xid(Device *device, const char *text) {
  if (device->xid_count == MAX_XIDS) return;
  device->xid_instances[device->xid_count] = ANY_INSTANCE;
  sscanf(text, "%u %u", &device->xids[device->xid_count], &device->xid_instances[device->xid_count]);
  device->xid_count++;
}

static void learn(Device *device, const char *fact, const char *text) {
  if (!strcmp(fact, "name")) snprintf(device->name, TEXT, "%s", text);
  if (!strcmp(fact, "memory"))
    device->has_memory = sscanf(text, "%llu %llu %llu", &device->total, &device->used, &device->reserved) == 3;
  if (!strcmp(fact, "utilization")) device->utilization = atoi(text);
  if (!strcmp(fact, "temperature")) device->temperature = atoi(text);
  if (!strcmp(fact, "power")) device->power = atoi(text);
  if (!strcmp(fact, "mig")) device->mig = !strcmp(text, "on");
  if (!strcmp(fact, "ecc")) sscanf(text, "%d %d", &device->ecc, &device->ecc_pending);
  if (!strcmp(fact, "rows")) sscanf(text, "%d %d", &device->rows_pending, &device->rows_failed);
  if (!strcmp(fact, "pages")) device->pages_pending = atoi(text);
  if (!strcmp(fact, "linked")) device->linked = atoi(text);
  if (!strcmp(fact, "process")) add_process(&device->processes, text);
  if (!strcmp(fact, "client")) add_process(&device->clients, text);
  if (!strcmp(fact, "xid")) add_xid(device, text);
}

static Device *learn_line(Device *device, const char *fact, const char *text) {
  char uuid[TEXT];
  unsigned id = 0;
  if (!strcmp(fact, "driver")) snprintf(driver, TEXT, "%s", text);
  else if (!strcmp(fact, "ledger")) ledger = ledger ? ledger : open_ledger(text);
  else if (!strcmp(fact, "calls")) snprintf(call_log, sizeof call_log, "%s", text);
  else if (!strcmp(fact, "error")) add_fault(device ? &device->errors : &global_errors, text);
  else if (!strcmp(fact, "hang")) add_fault(device ? &device->hangs : &global_hangs, text);
  else if (!strcmp(fact, "gpu")) device = gpus[gpu_count++] = listed(text, NULL);
  else if (!strcmp(fact, "instance") && gpu_count && sscanf(text, "%95s %u", uuid, &id) == 2) {
    device = instances[instance_count++] = listed(uuid, gpus[gpu_count - 1]);
    device->gpu_instance = id;
  } else if (device) learn(device, fact, text);
  return device;
}

static void refresh(void) {
  struct stat now;
  if (stat(control, &now)) { /* the test is over: let hanging calls go */
    global_hangs.count = 0;
    for (int i = 0; i < device_count; i++) devices[i].hangs.count = 0;
    return;
  }
  if (now.st_ino == read_as.st_ino && now.st_size == read_as.st_size &&
      now.st_mtim.tv_sec == read_as.st_mtim.tv_sec && now.st_mtim.tv_nsec == read_as.st_mtim.tv_nsec) return;
  FILE *file = fopen(control, "r");
  if (!file) return;
  read_as = now;
  gpu_count = instance_count = global_errors.count = global_hangs.count = 0;
  driver[0] = call_log[0] = 0;
  for (int i = 0; i < device_count; i++) forget_facts(&devices[i]);
  char line[4200], fact[TEXT];
  int text_at;
  Device *device = NULL;
  while (fgets(line, sizeof line, file)) {
    line[strcspn(line, "\n")] = 0;
    if (sscanf(line, "%95s %n", fact, &text_at) == 1) device = learn_line(device, fact, line + text_at);
  }
  fclose(file);
}

static int index_of(const Device *device) {
  for (int i = 0; i < gpu_count; i++)
    if (gpus[i] == device) return i;
  return -1;
}

/* What the ledger says of a GPU at this moment, in place of the control file's facts. */
static void read_ledger(Device *device) {
  int card = ledger && device ? index_of(device) : -1;
  if (card < 0 || card >= (int)ledger->cards) return;
  reclaim(ledger);
  device->used = device->processes.count = 0;
  for (int i = 0; i < MAX_HOLDERS; i++) {
    u64 bytes = ledger->holders[i].bytes[card];
    if (!bytes || ledger->holders[i].pid <= 0) continue;
    device->used += bytes; /* the sum of what processes hold, so that both figures agree */
    if (device->processes.count == MAX_PROCESSES) continue;
    device->processes.list[device->processes.count++] = (ProcessInfo){
      .pid = (unsigned)ledger->holders[i].pid, .used = bytes, .gpu_instance = ANY_INSTANCE, .compute_instance = ANY_INSTANCE};
  }
}

static const Fault *find(const Faults *faults, const char *function) {
  for (int i = 0; i < faults->count; i++)
    if (!strcmp(faults->list[i].function, function) || !strcmp(faults->list[i].function, "all"))
      return &faults->list[i];
  return NULL;
}

static double hang_of(const char *function, const Device *device) {
  const Fault *fault = device ? find(&device->hangs, function) : NULL;
  if (!fault && device && device->parent) fault = find(&device->parent->hangs, function);
  if (!fault) fault = find(&global_hangs, function);
  return fault ? fault->value : 0;
}

static int error_of(const char *function, const Device *device) {
  const Fault *fault = device ? find(&device->errors, function) : NULL;
  if (!fault && device && device->parent) fault = find(&device->parent->errors, function);
  if (!fault) fault = find(&global_errors, function);
  return fault ? (int)fault->value : SUCCESS;
}

static void note_call(const char *function, const Device *device) {
  FILE *log = call_log[0] ? fopen(call_log, "a") : NULL;
  if (!log) return;
  fprintf(log, "%s %s\n", function, device ? device->uuid : "-");
  fclose(log);
}

static double seconds_now(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Take the lock, hang as long as the file says and return the code the file asks for; the lock stays taken. */
static int begin(const char *function, Device *device) {
  static const struct timespec moment = {0, 5000000};
  double began = seconds_now();
  pthread_mutex_lock(&lock);
  refresh();
  note_call(function, device);
  while (seconds_now() - began < hang_of(function, device)) {
    pthread_mutex_unlock(&lock);
    nanosleep(&moment, NULL);
    pthread_mutex_lock(&lock);
    refresh();
  }
  int starting = !strcmp(function, "nvmlInitWithFlags");
  if (!initialised && !starting) return UNINITIALIZED;
  int error = error_of(function, device);
  if (error) return error;
  if (device && !device->live) return device->parent ? INVALID_ARGUMENT : GPU_IS_LOST;
  read_ledger(device);
  return SUCCESS;
}

static int end(int code) {
  pthread_mutex_unlock(&lock);
  return code;
}

#define BEGIN(device) do { int begun = begin(__func__, device); if (begun) return end(begun); } while (0)

static int number(const int *fact, unsigned *answer) {
  if (*fact < 0) return NOT_SUPPORTED;
  *answer = (unsigned)*fact;
  return SUCCESS;
}

static int text(const char *fact, char *answer, unsigned size) {
  if (strlen(fact) + 1 > size) return INSUFFICIENT_SIZE;
  strcpy(answer, fact);
  return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  pthread_mutex_lock(&lock);
  const char *path = getenv("NVML_FAKE_FILE");
  if (!control[0] && path) snprintf(control, sizeof control, "%s", path); /* once: getenv and setenv may race */
  pthread_mutex_unlock(&lock);
  BEGIN(NULL);
  initialised++;
  return end(SUCCESS);
}

int nvmlShutdown(void) {
  BEGIN(NULL);
  initialised--;
  for (int i = 0; i < device_count; i++) devices[i].registered = 0;
  return end(SUCCESS);
}

const char *nvmlErrorString(int code) {
  (void)code;
  return "an error of the fake NVML";
}

int nvmlSystemGetDriverVersion(char *version, unsigned size) {
  BEGIN(NULL);
  return end(driver[0] ? text(driver, version, size) : NOT_SUPPORTED);
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  BEGIN(NULL);
  *count = (unsigned)gpu_count;
  return end(SUCCESS);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **handle) {
  pthread_mutex_lock(&lock);
  refresh();
  Device *device = index < (unsigned)gpu_count ? gpus[index] : NULL;
  pthread_mutex_unlock(&lock);
  BEGIN(device);
  *handle = device;
  return end(device ? SUCCESS : INVALID_ARGUMENT);
}

/* What vLLM and torch ask beyond what an exporter does */

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  BEGIN(NULL);
  *version = 13000;
  return end(SUCCESS);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device **handle) {
  BEGIN(NULL);
  for (int i = 0; i < gpu_count; i++)
    if (!strcmp(gpus[i]->uuid, uuid)) return *handle = gpus[i], end(SUCCESS);
  return end(NOT_FOUND);
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device **handle) {
  unsigned domain, number; /* GPU n is on bus n + 1 */
  BEGIN(NULL);
  if (sscanf(bus, "%x:%x", &domain, &number) != 2 || number - 1 >= (unsigned)gpu_count) return end(NOT_FOUND);
  *handle = gpus[number - 1];
  return end(SUCCESS);
}

int nvmlDeviceGetIndex(Device *device, unsigned *index) {
  BEGIN(device);
  *index = (unsigned)index_of(device);
  return end(SUCCESS);
}

int nvmlDeviceGetMinorNumber(Device *device, unsigned *minor) { return nvmlDeviceGetIndex(device, minor); }

int nvmlDeviceGetCudaComputeCapability(Device *device, int *major, int *minor) {
  BEGIN(device);
  *major = 9;
  *minor = 0;
  return end(SUCCESS);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }

int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }

int nvmlDeviceGetGpuFabricInfoV(Device *device, unsigned char *info) {
  BEGIN(device);
  info[28] = 0; /* the state, after version, cluster UUID, status and clique: no fabric */
  return end(SUCCESS);
}

/* The first version of the list, which torch's message of an OutOfMemoryError reads. */
int nvmlDeviceGetComputeRunningProcesses(Device *device, unsigned *count, ProcessInfoV1 *infos) {
  BEGIN(device);
  unsigned room = *count;
  *count = (unsigned)device->processes.count;
  if (room < *count) return end(INSUFFICIENT_SIZE);
  for (unsigned i = 0; i < *count; i++)
    infos[i] = (ProcessInfoV1){.pid = device->processes.list[i].pid, .used = device->processes.list[i].used};
  return end(SUCCESS);
}

int nvmlDeviceGetP2PStatus(Device *device, Device *peer, int capability, int *status) {
  (void)capability;
  BEGIN(device);
  *status = device->linked > 0 && peer->linked > 0 ? 0 : 1; /* not supported by the chipset */
  return end(SUCCESS);
}

int nvmlDeviceGetUUID(Device *device, char *uuid, unsigned size) {
  BEGIN(device);
  return end(text(device->uuid, uuid, size));
}

int nvmlDeviceGetName(Device *device, char *name, unsigned size) {
  BEGIN(device);
  return end(device->name[0] ? text(device->name, name, size) : NOT_SUPPORTED);
}

int nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *memory) {
  BEGIN(device);
  if (!device->has_memory) return end(NOT_SUPPORTED);
  memory->total = device->total;
  memory->used = device->used + device->reserved;
  memory->free = device->total - memory->used;
  return end(SUCCESS);
}

#ifndef NO_V2
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *memory) {
  BEGIN(device);
  if (memory->version != MEMORY_V2) return end(ARGUMENT_VERSION_MISMATCH);
  if (!device->has_memory) return end(NOT_SUPPORTED);
  memory->total = device->total;
  memory->reserved = device->reserved;
  memory->used = device->used;
  memory->free = device->total - device->used - device->reserved;
  return end(SUCCESS);
}
#endif

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *utilization) {
  BEGIN(device);
  utilization->memory = 0;
  return end(number(&device->utilization, &utilization->gpu));
}

int nvmlDeviceGetTemperature(Device *device, unsigned sensor, unsigned *celsius) {
  (void)sensor;
  BEGIN(device);
  return end(number(&device->temperature, celsius));
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *milliwatts) {
  BEGIN(device);
  return end(number(&device->power, milliwatts));
}

static int list(const Processes *processes, unsigned *count, ProcessInfo *infos) {
  unsigned room = *count;
  *count = (unsigned)processes->count;
  if (room < *count) return end(INSUFFICIENT_SIZE);
  if (*count) memcpy(infos, processes->list, *count * sizeof *infos);
  return end(SUCCESS);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *infos) {
  BEGIN(device);
  return list(&device->processes, count, infos);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device *device, unsigned *count, ProcessInfo *infos) {
  BEGIN(device);
  return list(&device->clients, count, infos);
}

int nvmlDeviceGetEccMode(Device *device, unsigned *current, unsigned *pending) {
  BEGIN(device);
  *pending = device->ecc_pending > 0;
  return end(number(&device->ecc, current));
}

int nvmlDeviceGetRemappedRows(Device *device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                              unsigned *failed) {
  BEGIN(device);
  *correctable = *uncorrectable = 0;
  *failed = device->rows_failed > 0;
  return end(number(&device->rows_pending, pending));
}

int nvmlDeviceGetRetiredPagesPendingStatus(Device *device, unsigned *pending) {
  BEGIN(device);
  return end(number(&device->pages_pending, pending));
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
  BEGIN(device);
  *pending = device->mig > 0;
  return end(number(&device->mig, current));
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *count) {
  BEGIN(device);
  *count = device->mig < 0 ? 0 : 7;
  return end(SUCCESS);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **handle) {
  BEGIN(device);
  for (int i = 0; i < instance_count; i++)
    if (instances[i]->parent == device && index-- == 0) {
      *handle = instances[i];
      return end(SUCCESS);
    }
  return end(NOT_FOUND);
}

int nvmlDeviceGetGpuInstanceId(Device *device, unsigned *id) {
  BEGIN(device);
  if (!device->parent) return end(NOT_SUPPORTED);
  *id = device->gpu_instance;
  return end(SUCCESS);
}

int nvmlEventSetCreate(void **set) {
  static int only_one;
  BEGIN(NULL);
  *set = &only_one;
  return end(SUCCESS);
}

int nvmlDeviceRegisterEvents(Device *device, u64 types, void *set) {
  BEGIN(device);
  if (!set || types != XID_CRITICAL) return end(NOT_SUPPORTED);
  device->registered = 1;
  device->delivered = device->xid_count; /* earlier events are not replayed */
  return end(SUCCESS);
}

int nvmlEventSetWait_v2(void *set, EventData *data, unsigned milliseconds) {
  (void)set;
  (void)milliseconds;
  BEGIN(NULL);
  for (int i = 0; i < device_count; i++) {
    Device *device = &devices[i];
    if (!device->registered || device->delivered >= device->xid_count) continue;
    data->device = device;
    data->type = XID_CRITICAL;
    data->data = device->xids[device->delivered];
    data->gpu_instance = device->xid_instances[device->delivered];
    data->compute_instance = ANY_INSTANCE;
    device->delivered++;
    return end(SUCCESS);
  }
  return end(TIMEOUT);
}

int nvmlEventSetFree(void *set) {
  (void)set;
  BEGIN(NULL);
  return end(SUCCESS);
}
