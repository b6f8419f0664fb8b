// An imitation of the CUDA driver for tests on machines without a GPU: what the nvlink provider calls, with "device" memory
// that other processes can map, and streams that carry out their work late, each on a thread of its own.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500, NOT_READY = 600, REGISTERED = 712, NOT_REGISTERED = 713, MOST = 4096 };

typedef struct { char *start; size_t len; int file, physical; } Range;
static Range allocations[MOST], pinned[MOST], mapped[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static Range *find(Range *table, const char *at) {
  for (int i = 0; i < MOST; i++)
    if (table[i].start && table[i].start <= at && at < table[i].start + table[i].len) return &table[i];
  return NULL;
}

static int add(Range *table, char *start, size_t len, int file) {
  for (int i = 0; i < MOST; i++)
    if (!table[i].start) {
      table[i] = (Range){start, len, file, -1};
      return SUCCESS;
    }
  return INVALID_VALUE;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { return ordinal < 0 || ordinal > 3 ? 101 : (*device = ordinal, SUCCESS); }
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = attribute == 16 ? 4 : 1, (void)device, SUCCESS; }
int cuDeviceGetPCIBusId(char *text, int len, int device) { return snprintf(text, (size_t)len, "0000:0%d:00.0", device + 2), SUCCESS; }
int cuCtxPushCurrent_v2(void *context) { return (void)context, SUCCESS; }
int cuCtxPopCurrent_v2(void **context) { return *context = NULL, SUCCESS; }
/* A file in place of a DMA-BUF: it says what was asked for. */
int cuMemGetHandleForAddressRange(int *file, uint64_t start, size_t len, int kind, uint64_t flags) {
  if (start % 65536 || len % 65536 || kind != 1 || flags) return INVALID_VALUE;
  *file = memfd_create("dma_buf", 0);
  dprintf(*file, "%llu %zu", (unsigned long long)start, len);
  return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (char *)8 + device, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int device) { return (void)device, SUCCESS; }
int cuCtxSetCurrent(void *context) { return (void)context, SUCCESS; }
int cuCtxEnablePeerAccess(void *context, unsigned flags) { return (void)context, (void)flags, SUCCESS; }
int cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, SUCCESS; }
int cuGetErrorString(int code, const char **text) { return *text = code == SUCCESS ? "no error" : "an imitated error", SUCCESS; }

int cuMemAlloc_v2(uint64_t *address, size_t len) {
  int file = memfd_create("imitated device memory", 0);
  if (file < 0 || ftruncate(file, (off_t)len)) return 2;
  char *start = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (start == MAP_FAILED) return 2;
  pthread_mutex_lock(&lock);
  int code = add(allocations, start, len, file);
  pthread_mutex_unlock(&lock);
  *address = (uint64_t)start;
  return code;
}

int cuMemFree_v2(uint64_t address) {
  pthread_mutex_lock(&lock);
  Range *range = find(allocations, (char *)address);
  if (range) {
    munmap(range->start, range->len);
    close(range->file);
    range->start = NULL;
  }
  pthread_mutex_unlock(&lock);
  return range ? SUCCESS : INVALID_VALUE;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *len, uint64_t address) {
  pthread_mutex_lock(&lock);
  Range *range = find(allocations, (char *)address);
  if (range) *base = (uint64_t)range->start, *len = range->len;
  pthread_mutex_unlock(&lock);
  return range ? SUCCESS : NOT_FOUND;
}

typedef struct { char text[64]; } Handle;

int cuIpcGetMemHandle(Handle *handle, uint64_t address) {
  pthread_mutex_lock(&lock);
  Range *range = find(allocations, (char *)address);
  int whole = range && range->physical < 0;
  if (whole) snprintf(handle->text, sizeof handle->text, "/proc/%d/fd/%d", (int)getpid(), range->file);
  pthread_mutex_unlock(&lock);
  return whole ? SUCCESS : INVALID_VALUE;
}

int cuIpcOpenMemHandle_v2(uint64_t *address, Handle handle, unsigned flags) {
  struct stat about;
  int file = flags == 1 ? open(handle.text, O_RDWR | O_CLOEXEC) : -1;
  if (file < 0 || fstat(file, &about)) return INVALID_VALUE;
  char *start = mmap(NULL, (size_t)about.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (start == MAP_FAILED) return INVALID_VALUE;
  pthread_mutex_lock(&lock);
  add(mapped, start, (size_t)about.st_size, -1);
  pthread_mutex_unlock(&lock);
  *address = (uint64_t)start;
  return SUCCESS;
}

int cuIpcCloseMemHandle(uint64_t address) {
  pthread_mutex_lock(&lock);
  Range *range = find(mapped, (char *)address);
  if (range) munmap(range->start, range->len), range->start = NULL;
  pthread_mutex_unlock(&lock);
  return range ? SUCCESS : INVALID_VALUE;
}

// Physical memory, which is mapped piece by piece into ranges of addresses.
typedef struct { int users, file, kinds; size_t len; } Physical;
static Physical physicals[MOST];
static Range reserved[MOST];
enum { PIECE = 2 << 20 };

static Physical *physical(uint64_t handle) {
  return handle && handle <= MOST && physicals[handle - 1].users ? &physicals[handle - 1] : NULL;
}

static int hold(uint64_t *handle, int file, size_t len, int kinds) {
  int code = INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < MOST && code; i++)
    if (!physicals[i].users) physicals[i] = (Physical){1, file, kinds, len}, *handle = (uint64_t)i + 1, code = SUCCESS;
  pthread_mutex_unlock(&lock);
  return code;
}

static int let_go(uint64_t handle) {
  Physical *found = physical(handle);
  if (found && !--found->users) close(found->file);
  return found ? SUCCESS : INVALID_VALUE;
}

// The properties begin with the kind of memory and the kinds of handles that it may be shared by.
int cuMemCreate(uint64_t *handle, size_t len, const int *properties, uint64_t flags) {
  int file = len && len % PIECE == 0 && properties[0] == 1 && !flags ? memfd_create("imitated pieces", MFD_CLOEXEC) : -1;
  return file < 0 || ftruncate(file, (off_t)len) ? INVALID_VALUE : hold(handle, file, len, properties[1]);
}

int cuMemRelease(uint64_t handle) {
  pthread_mutex_lock(&lock);
  int code = let_go(handle);
  pthread_mutex_unlock(&lock);
  return code;
}

int cuMemRetainAllocationHandle(uint64_t *handle, uint64_t address) {
  pthread_mutex_lock(&lock);
  Range *range = find(allocations, (char *)address);
  int right = range && range->physical >= 0;
  if (right) *handle = (uint64_t)range->physical, physical(*handle)->users++;
  pthread_mutex_unlock(&lock);
  return right ? SUCCESS : INVALID_VALUE;
}

int cuMemExportToShareableHandle(void *into, uint64_t handle, int kind, uint64_t flags) {
  pthread_mutex_lock(&lock);
  Physical *found = physical(handle);
  int file = found && kind == 1 && (found->kinds & 1) && !flags ? fcntl(found->file, F_DUPFD_CLOEXEC, 0) : -1;
  pthread_mutex_unlock(&lock);
  return file < 0 ? INVALID_VALUE : (*(int *)into = file, SUCCESS);
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *file, int kind) {
  struct stat about;
  int own = kind == 1 ? fcntl((int)(intptr_t)file, F_DUPFD_CLOEXEC, 0) : -1;
  return own < 0 || fstat(own, &about) ? INVALID_VALUE : hold(handle, own, (size_t)about.st_size, 1);
}

int cuMemAddressReserve(uint64_t *address, size_t len, size_t alignment, uint64_t wish, uint64_t flags) {
  if (!len || len % PIECE || alignment || wish || flags) return INVALID_VALUE;
  char *start = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return 2;
  pthread_mutex_lock(&lock);
  int code = add(reserved, start, len, -1);
  pthread_mutex_unlock(&lock);
  *address = (uint64_t)start;
  return code;
}

int cuMemAddressFree(uint64_t address, size_t len) {
  pthread_mutex_lock(&lock);
  Range *range = find(reserved, (char *)address);
  int right = range && range->start == (char *)address && range->len == len;
  for (size_t at = 0; right && at < len; at += PIECE) right = !find(allocations, (char *)address + at);
  if (right) munmap(range->start, len), range->start = NULL;
  pthread_mutex_unlock(&lock);
  return right ? SUCCESS : INVALID_VALUE;
}

// Nobody may touch what is mapped before access has been set.
int cuMemMap(uint64_t address, size_t len, size_t offset, uint64_t handle, uint64_t flags) {
  pthread_mutex_lock(&lock);
  Physical *found = physical(handle);
  Range *range = find(reserved, (char *)address);
  int right = found && range && !offset && !flags && found->len == len && (char *)address + len <= range->start + range->len &&
              !find(allocations, (char *)address);
  right = right && mmap((char *)address, len, PROT_NONE, MAP_SHARED | MAP_FIXED, found->file, 0) != MAP_FAILED;
  if (right && !add(allocations, (char *)address, len, -1)) find(allocations, (char *)address)->physical = (int)handle, found->users++;
  pthread_mutex_unlock(&lock);
  return right ? SUCCESS : INVALID_VALUE;
}

int cuMemUnmap(uint64_t address, size_t len) {
  pthread_mutex_lock(&lock);
  Range *range = find(allocations, (char *)address);
  int right = range && range->physical >= 0 && range->start == (char *)address && range->len == len;
  if (right) {
    mmap(range->start, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    let_go((uint64_t)range->physical);
    range->start = NULL;
  }
  pthread_mutex_unlock(&lock);
  return right ? SUCCESS : INVALID_VALUE;
}

// One description: a device, and reading and writing.
int cuMemSetAccess(uint64_t address, size_t len, const int *who, size_t count) {
  int right = count == 1 && who[0] == 1 && who[1] >= 0 && who[1] <= 3 && who[2] == 3;
  return right && !mprotect((char *)address, len, PROT_READ | PROT_WRITE) ? SUCCESS : INVALID_VALUE;
}

int cuMemHostRegister_v2(void *start, size_t len, unsigned flags) {
  pthread_mutex_lock(&lock);
  int code = flags != 3 ? INVALID_VALUE : find(pinned, start) ? REGISTERED : add(pinned, start, len, -1);
  pthread_mutex_unlock(&lock);
  return code;
}

int cuMemHostGetDevicePointer_v2(uint64_t *address, void *start, unsigned flags) {
  pthread_mutex_lock(&lock);
  int right = !flags && find(pinned, start);
  pthread_mutex_unlock(&lock);
  return right ? (*address = (uint64_t)start, SUCCESS) : INVALID_VALUE;
}

int cuMemHostUnregister(void *start) {
  pthread_mutex_lock(&lock);
  Range *range = find(pinned, start);
  int right = range && range->start == (char *)start;
  if (right) range->start = NULL;
  pthread_mutex_unlock(&lock);
  return right ? SUCCESS : NOT_REGISTERED;
}

// Streams.
typedef struct Work {
  struct Work *next;
  char *dst;
  const char *src;
  size_t len;
  uint64_t *word, value;
  struct Module *module;  // of a kernel on a step's word: `layer_done` if there is a word, otherwise `stamp`
} Work;
typedef struct { Work *first, **last; } Graph;
typedef struct {
  pthread_t thread;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  Work *first, **last;
  int busy, end;
  unsigned seed;
  Graph *captures;
} Stream;

typedef struct Module {
  const char *text;
  uint64_t step, highest;
} Module;

static void run_on_word(Module *module, uint64_t *word, uint64_t value) {
  if (!word) module->step = value;
  value |= module->step << 16;
  if (!word || !module->step || value <= module->highest) return;
  module->highest = value;
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static void *carry_out(void *argument) {
  Stream *stream = argument;
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    while (!stream->first && !stream->end) pthread_cond_wait(&stream->changed, &stream->lock);
    Work *work = stream->first;
    if (!work) break;
    stream->first = work->next;
    if (!stream->first) stream->last = &stream->first;
    stream->busy = 1;
    pthread_mutex_unlock(&stream->lock);
    usleep((unsigned)rand_r(&stream->seed) % 100);
    if (work->module) run_on_word(work->module, work->word, work->value);
    else if (work->word) __atomic_store_n(work->word, work->value, __ATOMIC_RELEASE);
    else memcpy(work->dst, work->src, work->len);
    free(work);
    pthread_mutex_lock(&stream->lock);
    stream->busy = 0;
  }
  pthread_mutex_unlock(&stream->lock);
  return NULL;
}

int cuStreamCreate(Stream **into, unsigned flags) {
  static unsigned seeds;
  Stream *stream = calloc(1, sizeof *stream);
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  stream->last = &stream->first;
  stream->seed = ++seeds;
  *into = stream;
  return flags != 1 ? INVALID_VALUE : pthread_create(&stream->thread, NULL, carry_out, stream);
}

int cuStreamDestroy_v2(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  stream->end = 1;
  pthread_cond_signal(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  pthread_join(stream->thread, NULL);
  free(stream);
  return SUCCESS;
}

int cuStreamQuery(Stream *stream) {
  pthread_mutex_lock(&stream->lock);
  int busy = stream->busy || stream->first;
  pthread_mutex_unlock(&stream->lock);
  return busy ? NOT_READY : SUCCESS;
}

static int queue(Stream *stream, Work what) {
  Work *work = malloc(sizeof *work);
  *work = what;
  work->next = NULL;
  pthread_mutex_lock(&stream->lock);
  Work ***last = stream->captures ? &stream->captures->last : &stream->last;
  **last = work;
  *last = &work->next;
  pthread_cond_signal(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  return SUCCESS;
}

int cuMemcpyAsync(uint64_t dst, uint64_t src, size_t len, Stream *stream) {
  return queue(stream, (Work){.dst = (char *)dst, .src = (char *)src, .len = len});
}

int cuStreamWriteValue64_v2(Stream *stream, uint64_t address, uint64_t value, unsigned flags) {
  // A GPU can store to memory only that is pinned.
  pthread_mutex_lock(&lock);
  Range *range = find(pinned, (char *)address);
  pthread_mutex_unlock(&lock);
  if (flags || !range) return INVALID_VALUE;
  return queue(stream, (Work){.word = (uint64_t *)address, .value = value});
}

int cuStreamGetCtx(Stream *stream, void **context) { return stream ? (*context = (char *)8, SUCCESS) : 201; }

int cuStreamBeginCapture_v2(Stream *stream, int mode) {
  Graph *graph = calloc(1, sizeof *graph);
  graph->last = &graph->first;
  stream->captures = graph;
  return (void)mode, SUCCESS;
}

int cuStreamEndCapture(Stream *stream, Graph **graph) { return *graph = stream->captures, stream->captures = NULL, SUCCESS; }
int cuGraphInstantiateWithFlags(Graph **into, Graph *graph, uint64_t flags) { return *into = graph, (void)flags, SUCCESS; }

int cuGraphLaunch(Graph *graph, Stream *stream) {
  for (Work *work = graph->first; work; work = work->next) queue(stream, *work);
  return SUCCESS;
}

int cuStreamSynchronize(Stream *stream) {
  while (cuStreamQuery(stream) == NOT_READY) usleep(100);
  return SUCCESS;
}

int cuMemcpyDtoH_v2(void *dst, uint64_t src, size_t len) { return memcpy(dst, (char *)src, len), SUCCESS; }
int cuMemcpyHtoD_v2(uint64_t dst, const void *src, size_t len) { return memcpy((char *)dst, src, len), SUCCESS; }

// A module by what its text says, and its functions by their names.
int cuModuleLoadData(void **module, const char *text) {
  Module *made = calloc(1, sizeof *made);
  made->text = text;
  return *module = made, strstr(text, ".entry") ? SUCCESS : INVALID_VALUE;
}

int cuModuleUnload(void *module) { return free(module), SUCCESS; }

typedef struct { Module *module; char kind; } Function;

int cuModuleGetFunction(Function **function, Module *module, const char *name) {
  const char *names[] = {"putget_transfer_pages", "putget_transfer_stamp", "putget_transfer_layer_done"};
  for (int i = 0; i < 3; i++)
    if (!strcmp(name, names[i]) && strstr(module->text, name)) {
      *function = calloc(1, sizeof **function);
      **function = (Function){module, "psl"[i]};
      return SUCCESS;
    }
  return NOT_FOUND;
}

static int is_pinned(const void *at) {
  pthread_mutex_lock(&lock);
  Range *range = find(pinned, at);
  pthread_mutex_unlock(&lock);
  return range != NULL;
}

int cuLaunchKernel(Function *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   Stream *stream, void **arguments, void **extra) {
  if (!function || !x || y != 1 || z != 1 || by != 1 || bz != 1 || shared || extra) return INVALID_VALUE;
  if (function->kind != 'p') {
    uint64_t *word = function->kind == 'l' ? *(uint64_t **)arguments[0] : NULL;
    if (x != 1 || bx != 1 || (word && !is_pinned(word))) return INVALID_VALUE;
    uint64_t value = word ? *(unsigned *)arguments[1] : *(uint64_t *)arguments[0];
    return queue(stream, (Work){.module = function->module, .word = word, .value = value});
  }
  uint64_t(*pieces)[3] = *(void **)arguments[0];
  if (bx % 32 || !is_pinned(pieces)) return INVALID_VALUE;
  for (unsigned i = 0; i < *(unsigned *)arguments[1]; i++) cuMemcpyAsync(pieces[i][1], pieces[i][0], pieces[i][2], stream);
  return SUCCESS;
}
