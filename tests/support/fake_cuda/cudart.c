/* A CUDA runtime without a GPU: "device memory" is memory of the host, and kernels do nothing.

   Work that a stream has to wait for comes from NCCL's stand-in alone: streams and events know what is under way, and
   each copy, kernel and wait of the host on a stream waits for it. Variables of the environment:

   FAKE_GPUS     number of GPUs of the machine (2)
   FAKE_GIB      memory of each in GiB (80)
   FAKE_MAJOR    compute capability (9)
   FAKE_DRIVER   the driver's CUDA version (13000); a torch for a newer one finds no GPU
   FAKE_LEDGER   the file with the bytes in use of each GPU, and after 64 of these the most so far (/dev/shm/fake-cuda-ledger)
   FAKE_NO_P2P   set: GPUs cannot read each other's memory
   FAKE_OOM_AT   the number of the allocation of a process that fails */
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { char *at; size_t size; int kind, device, file, phys; } Block; /* kind: 1 host, 2 device, 3 opened */
static Block blocks[1 << 16];
static int used_blocks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device, last;
static __thread int capturing;
static int started; /* the process that has used CUDA first: its forks cannot use it, as with a real driver */
static int forked(void) {
    if (!started) started = getpid();
    return started != getpid();
}
void (*fakecuda_hook)(const char *what, size_t bytes); /* set from Python by ctypes: called for each wait of the host */
static void tell(const char *what, size_t bytes) { if (fakecuda_hook) fakecuda_hook(what, bytes); }

static size_t total(void) { const char *g = getenv("FAKE_GIB"); return (size_t)(1073741824.0 * (g ? atof(g) : 80)); }
static int physical[64], count = -1;
static int driver(void) { const char *v = getenv("FAKE_DRIVER"); return v ? atoi(v) : 13000; }
static int devices(void) {
    if (count >= 0) return count;
    if (driver() < 13000) return count = 0;
    const char *seen = getenv("CUDA_VISIBLE_DEVICES"), *all = getenv("FAKE_GPUS");
    int most = all ? atoi(all) : 2, n = 0;
    if (!seen) { for (; n < most; n++) physical[n] = n; }
    else for (char *copy = strdup(seen), *part = strtok(copy, ","); part; part = strtok(NULL, ",")) {
        int each = !strncmp(part, "GPU-", 4) || !strncmp(part, "MIG-", 4) ? (int)strtol(part + 34, NULL, 16) : atoi(part);
        if (each < 0 || each >= most) break;
        physical[n++] = each;
    }
    return count = n;
}
/* Bytes in use of each physical GPU, by all processes. A process that is killed leaves its bytes: remove the file. */
static volatile long *ledger(void) {
    static volatile long *at;
    if (!at) {
        const char *path = getenv("FAKE_LEDGER") ? getenv("FAKE_LEDGER") : "/dev/shm/fake-cuda-ledger";
        int file = open(path, O_RDWR | O_CREAT, 0600);
        if (ftruncate(file, 4096)) abort();
        at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
    }
    return at;
}
static void __attribute__((destructor)) gone(void) {
    if (started && started != getpid()) return;
    for (int i = 0; i < used_blocks; i++) if (blocks[i].kind == 2 && blocks[i].at) __sync_fetch_and_sub(&ledger()[blocks[i].phys], blocks[i].size);
}
int fakecuda_take(int phys, size_t size) {
    long now = __sync_add_and_fetch(&ledger()[phys], size), most;
    if ((size_t)now > total()) { __sync_fetch_and_sub(&ledger()[phys], size); return 1; }
    while ((most = ledger()[64 + phys]) < now && !__sync_bool_compare_and_swap(&ledger()[64 + phys], most, now)) {}
    return 0;
}
void fakecuda_give(int phys, size_t size) { __sync_fetch_and_sub(&ledger()[phys], size); }
int fakecuda_phys(int dev) { devices(); return physical[dev]; }

static cudaError_t add(void **out, size_t size, int kind) {
    size_t real = (size + 2097151) / 2097152 * 2097152;
    int file = memfd_create("fakecuda", MFD_CLOEXEC);
    if (ftruncate(file, real)) return last = cudaErrorMemoryAllocation;
    char *at = mmap(NULL, real, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (at == MAP_FAILED) return last = cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    int i = 0;
    while (i < used_blocks && blocks[i].at) i++;
    if (i == used_blocks) used_blocks++;
    blocks[i] = (Block){at, real, kind, device, file, kind == 2 ? fakecuda_phys(device) : -1};
    pthread_mutex_unlock(&lock);
    *out = at;
    return 0;
}
static cudaError_t drop(void *at) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < used_blocks; i++) if (blocks[i].at == at) {
        munmap(at, blocks[i].size); close(blocks[i].file);
        if (blocks[i].kind == 2) fakecuda_give(blocks[i].phys, blocks[i].size);
        blocks[i].at = NULL;
        break;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}
static Block *find(const void *at) {
    for (int i = 0; i < used_blocks; i++)
        if (blocks[i].at && (char *)at >= blocks[i].at && (char *)at < blocks[i].at + blocks[i].size) return &blocks[i];
    return NULL;
}
int fakecuda_kind(const void *at) { Block *b = find(at); return b ? b->kind : 0; }

/* Streams and events: which pieces of work must be done before what is asked of them next. */
#define MOST 32
typedef struct Stream Stream;
typedef struct { Stream *on; long number; } Piece;
typedef struct { int n; Piece of[MOST]; } Pieces;
struct Stream { volatile long asked, done; Pieces before; };
typedef struct { Pieces before; } Event;
static Stream usual; /* the default streams */
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static Stream *at(cudaStream_t s) { return (size_t)s < 16 ? &usual : (Stream *)s; }
static int over(Piece p) { return p.on->done >= p.number; }
static void join(Pieces *to, const Pieces *from) {
    for (int i = 0; i < from->n; i++) {
        int k = 0;
        if (over(from->of[i])) continue;
        while (k < to->n && to->of[k].on != from->of[i].on) k++;
        if (k == to->n) { /* in the place of one that is over */
            for (k = 0; k < to->n && !over(to->of[k]); k++) {}
            if (k == MOST) { fprintf(stderr, "fake CUDA: too many streams wait for each other\n"); abort(); }
            if (k == to->n) to->n++;
            to->of[k] = from->of[i];
        } else if (to->of[k].number < from->of[i].number) to->of[k] = from->of[i];
    }
}
static int all_over(const Pieces *p) {
    for (int i = 0; i < p->n; i++) if (!over(p->of[i])) return 0;
    return 1;
}
static void settle(Pieces *p) { while (!all_over(p)) usleep(50); }
static Pieces copied(Pieces *p) {
    pthread_mutex_lock(&order);
    Pieces own = *p;
    pthread_mutex_unlock(&order);
    return own;
}
void fakecuda_settle(cudaStream_t s) { /* wait for all work before this point of a stream */
    if (!at(s)->before.n) return;
    Pieces own = copied(&at(s)->before);
    settle(&own);
}
/* Of NCCL: a piece of work is asked for, later its own thread waits until it may begin, and says that it is done. */
typedef struct { Pieces before; Piece own; } Work;
void *fakecuda_ask(cudaStream_t s) {
    Work *w = calloc(1, sizeof *w);
    pthread_mutex_lock(&order);
    Stream *on = at(s);
    w->before = on->before;
    w->own = (Piece){on, ++on->asked};
    Pieces new = {1, {w->own}};
    join(&on->before, &new);
    pthread_mutex_unlock(&order);
    return w;
}
void fakecuda_begin(void *w) { settle(&((Work *)w)->before); }
void fakecuda_end(void *w) { __sync_synchronize(); ((Work *)w)->own.on->done = ((Work *)w)->own.number; free(w); }

#define OK { return 0; }
cudaError_t cudaGetDeviceCount(int *n) {
    if (forked()) return last = cudaErrorInitializationError;
    *n = devices();
    return *n ? 0 : (last = driver() < 13000 ? cudaErrorInsufficientDriver : cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int *d) { *d = device; return 0; }
cudaError_t cudaSetDevice(int d) { if (forked()) return last = cudaErrorInitializationError; if (d < 0 || d >= devices()) return last = cudaErrorInvalidDevice; device = d; return 0; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    if (d >= devices()) return last = cudaErrorInvalidDevice;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Fake GPU");
    p->uuid.bytes[15] = (char)fakecuda_phys(d);
    p->totalGlobalMem = total(); p->sharedMemPerBlock = 49152; p->regsPerBlock = 65536; p->warpSize = 32;
    p->maxThreadsPerBlock = 1024; p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024; p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647; p->maxGridSize[1] = p->maxGridSize[2] = 65535; p->major = getenv("FAKE_MAJOR") ? atoi(getenv("FAKE_MAJOR")) : 9;
    p->multiProcessorCount = 132; p->maxThreadsPerMultiProcessor = 2048; p->sharedMemPerMultiprocessor = 233472;
    p->regsPerMultiprocessor = 65536; p->sharedMemPerBlockOptin = 232448; p->l2CacheSize = 62914560; p->pciBusID = fakecuda_phys(d) + 1;
    p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = p->cooperativeLaunch = p->ipcEventSupported = 1;
    p->maxBlocksPerMultiProcessor = 32; p->memoryBusWidth = 6144; p->asyncEngineCount = 3; p->memoryPoolsSupported = 1;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *v, enum cudaDeviceAttr a, int d) {
    struct cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, d)) return last;
    switch (a) {
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMultiProcessorCount: *v = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *v = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 232448; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 233472; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *v = 65536; break;
    case cudaDevAttrL2CacheSize: *v = 62914560; break;
    case cudaDevAttrUnifiedAddressing: case cudaDevAttrConcurrentKernels: case cudaDevAttrCooperativeLaunch: *v = 1; break;
    case cudaDevAttrPciBusId: *v = p.pciBusID; break;
    case cudaDevAttrClockRate: *v = 1980000; break;
    default: *v = 0;
    }
    return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *s, int n, int d) { snprintf(s, n, "0000:%02x:00.0", fakecuda_phys(d) + 1); return 0; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = a != b && !getenv("FAKE_NO_P2P"); return 0; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high) { *low = 0; *high = -5; return 0; }
cudaError_t cudaDriverGetVersion(int *v) { *v = driver(); return 0; }
cudaError_t cudaRuntimeGetVersion(int *v) { *v = 13000; return 0; }
cudaError_t cudaMemGetInfo(size_t *f, size_t *t) { *t = total(); long u = ledger()[fakecuda_phys(device)]; *f = *t > (size_t)u ? *t - u : 0; return 0; }
cudaError_t cudaMalloc(void **p, size_t n) {
    static int calls;
    const char *fails = getenv("FAKE_OOM_AT");
    if (forked()) return last = cudaErrorInitializationError;
    if (!devices()) return last = cudaErrorNoDevice;
    if (fails && __sync_add_and_fetch(&calls, 1) == atoi(fails)) return last = cudaErrorMemoryAllocation;
    tell("cudaMalloc", n);
    size_t real = (n + 2097151) / 2097152 * 2097152;
    if (fakecuda_take(fakecuda_phys(device), real)) return last = cudaErrorMemoryAllocation;
    return add(p, n, 2);
}
cudaError_t cudaMallocAsync(void **p, size_t n, cudaStream_t s) { return cudaMalloc(p, n); }
cudaError_t cudaFree(void *p) { if (p) { tell("cudaFree", 0); drop(p); } return 0; }
cudaError_t cudaFreeAsync(void *p, cudaStream_t s) { return cudaFree(p); }
cudaError_t cudaHostAlloc(void **p, size_t n, unsigned f) { tell("cudaHostAlloc", n); return add(p, n, 1); }
cudaError_t cudaFreeHost(void *p) { tell("cudaFreeHost", 0); return drop(p); }
cudaError_t cudaHostGetDevicePointer(void **d, void *h, unsigned f) { *d = h; return 0; }
cudaError_t cudaHostRegister(void *p, size_t n, unsigned f) OK
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    Block *b = find(p);
    a->type = !b ? cudaMemoryTypeUnregistered : b->kind == 1 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    a->device = b ? b->device : 0; a->devicePointer = a->hostPointer = b ? (void *)p : NULL;
    return 0;
}
static void pageable(const void *d, const void *s, size_t n, enum cudaMemcpyKind k) {
    if (k == cudaMemcpyDeviceToHost && fakecuda_kind(d) != 1) tell("copy to pageable memory", n);
    if (k == cudaMemcpyHostToDevice && fakecuda_kind(s) != 1) tell("copy from pageable memory", n);
}
cudaError_t cudaMemcpyAsync(void *d, const void *s, size_t n, enum cudaMemcpyKind k, cudaStream_t st) { fakecuda_settle(st); pageable(d, s, n, k); memmove(d, s, n); return 0; }
cudaError_t cudaMemcpy(void *d, const void *s, size_t n, enum cudaMemcpyKind k) { fakecuda_settle(0); tell("cudaMemcpy", n); memmove(d, s, n); return 0; }
cudaError_t cudaMemcpyPeerAsync(void *d, int dd, const void *s, int ds, size_t n, cudaStream_t st) { fakecuda_settle(st); memmove(d, s, n); return 0; }
cudaError_t cudaMemcpy2DAsync(void *d, size_t dp, const void *s, size_t sp, size_t w, size_t h, enum cudaMemcpyKind k, cudaStream_t st) {
    fakecuda_settle(st);
    for (size_t i = 0; i < h; i++) memmove((char *)d + i * dp, (char *)s + i * sp, w);
    return 0;
}
static void zero(char *p, size_t n) { /* leaves memory that was never written unwritten */
    char *from = (char *)(((size_t)p + 4095) / 4096 * 4096), *to = (char *)(((size_t)p + n) / 4096 * 4096);
    if (to <= from || n < 65536 || madvise(from, to - from, MADV_REMOVE)) { memset(p, 0, n); return; }
    memset(p, 0, from - p); memset(to, 0, p + n - to);
}
cudaError_t cudaMemsetAsync(void *p, int v, size_t n, cudaStream_t s) { fakecuda_settle(s); if (v) memset(p, v, n); else zero(p, n); return 0; }
cudaError_t cudaMemset(void *p, int v, size_t n) { return cudaMemsetAsync(p, v, n, 0); }
cudaError_t cudaStreamSynchronize(cudaStream_t s) { tell("cudaStreamSynchronize", 0); fakecuda_settle(s); return 0; }
cudaError_t cudaEventSynchronize(cudaEvent_t e) {
    tell("cudaEventSynchronize", 0);
    Pieces own = copied(&((Event *)e)->before);
    settle(&own);
    return 0;
}
static Stream *all[4096];
static int streams;
cudaError_t cudaDeviceSynchronize(void) {
    tell("cudaDeviceSynchronize", 0);
    fakecuda_settle(0);
    for (int i = 0; i < streams; i++) if (all[i]) fakecuda_settle((cudaStream_t)all[i]);
    return 0;
}
static cudaError_t new_stream(cudaStream_t *s) {
    Stream *made = calloc(1, sizeof *made);
    if (streams < 4096) all[__sync_fetch_and_add(&streams, 1)] = made;
    *s = (cudaStream_t)made;
    return 0;
}
static cudaError_t handle(void **p) { *p = calloc(1, 64); return 0; }
cudaError_t cudaStreamCreate(cudaStream_t *s) { return new_stream(s); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *s, unsigned f) { return new_stream(s); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned f, int p) { return new_stream(s); }
cudaError_t cudaStreamGetPriority(cudaStream_t s, int *p) { *p = 0; return 0; }
cudaError_t cudaStreamDestroy(cudaStream_t s) OK
cudaError_t cudaStreamQuery(cudaStream_t s) { Pieces own = copied(&at(s)->before); return all_over(&own) ? 0 : cudaErrorNotReady; }
cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned f) {
    pthread_mutex_lock(&order);
    join(&at(s)->before, &((Event *)e)->before);
    pthread_mutex_unlock(&order);
    return 0;
}
static cudaError_t new_event(cudaEvent_t *e) { *e = calloc(1, sizeof(Event)); return 0; }
cudaError_t cudaEventCreate(cudaEvent_t *e) { return new_event(e); }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned f) { return new_event(e); }
cudaError_t cudaEventDestroy(cudaEvent_t e) OK
cudaError_t cudaEventQuery(cudaEvent_t e) { Pieces own = copied(&((Event *)e)->before); return all_over(&own) ? 0 : cudaErrorNotReady; }
cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    pthread_mutex_lock(&order);
    ((Event *)e)->before.n = 0;
    join(&((Event *)e)->before, &at(s)->before);
    pthread_mutex_unlock(&order);
    return 0;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t e, cudaStream_t s, unsigned f) { return cudaEventRecord(e, s); }
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return 0; }
cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m) { capturing = 1; return 0; }
cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *g) { capturing = 0; return handle((void **)g); }
cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *c) { *c = capturing ? cudaStreamCaptureStatusActive : 0; return 0; }
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t s, enum cudaStreamCaptureStatus *c, unsigned long long *id, cudaGraph_t *g,
    const cudaGraphNode_t **d, const cudaGraphEdgeData **e, size_t *n) {
    *c = capturing ? cudaStreamCaptureStatusActive : 0;
    if (id) *id = 1;
    if (g) handle((void **)g);
    if (d) *d = NULL;
    if (e) *e = NULL;
    if (n) *n = 0;
    return 0;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *x, cudaGraph_t g, unsigned long long f) { return handle((void **)x); }
cudaError_t cudaGraphGetNodes(cudaGraph_t g, cudaGraphNode_t *nodes, size_t *n) { *n = 1; return 0; }
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m) OK
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t f, void *d) { fakecuda_settle(s); f(d); return 0; }
cudaError_t cudaStreamAddCallback(cudaStream_t s, cudaStreamCallback_t f, void *d, unsigned g) { f(s, 0, d); return 0; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    memset(a, 0, sizeof *a); a->maxThreadsPerBlock = 1024; a->numRegs = 32; a->ptxVersion = a->binaryVersion = 90; a->maxDynamicSharedSizeBytes = 232448; return 0;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, const void *f, int b, size_t m) { *n = 2; return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int b, size_t m, unsigned g) { *n = 2; return 0; }
cudaError_t cudaGetSymbolAddress(void **p, const void *s) { *p = calloc(1, 1 << 16); return 0; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *p, int d) { return handle((void **)p); }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t p, enum cudaMemPoolAttr a, void *v) { *(unsigned long long *)v = 0; return 0; }
/* memory of other processes: a handle names the file of the block, and the place in it */
typedef struct { int pid, file; size_t size; int phys; } Named;
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *h, void *p) {
    Block *b = find(p);
    if (!b || b->at != p) return last = cudaErrorInvalidValue;
    memset(h, 0, sizeof *h);
    *(Named *)h = (Named){getpid(), b->file, b->size, b->phys};
    return 0;
}
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t h, unsigned f) {
    Named *n = (Named *)&h;
    char path[64];
    if (n->pid == getpid()) return last = cudaErrorDeviceUninitialized; /* as CUDA does */
    snprintf(path, sizeof path, "/proc/%d/fd/%d", n->pid, n->file);
    int file = open(path, O_RDWR);
    if (file < 0) return last = cudaErrorInvalidResourceHandle;
    char *at = mmap(NULL, n->size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    pthread_mutex_lock(&lock);
    blocks[used_blocks++] = (Block){at, n->size, 3, device, file, n->phys};
    pthread_mutex_unlock(&lock);
    if (n->phys != fakecuda_phys(device)) fprintf(stderr, "fake CUDA: opened memory of GPU %d on GPU %d\n", n->phys, fakecuda_phys(device));
    *p = at;
    return 0;
}
cudaError_t cudaIpcCloseMemHandle(void *p) { return drop(p); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *h, cudaEvent_t e) { memset(h, 0, sizeof *h); return 0; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *e, cudaIpcEventHandle_t h) { return new_event(e); }
const char *cudaGetErrorName(cudaError_t e) { return e ? "cudaErrorFake" : "cudaSuccess"; }
const char *cudaGetErrorString(cudaError_t e) { static char s[64]; snprintf(s, 64, e == cudaErrorMemoryAllocation ? "out of memory (fake)" : e == cudaErrorInitializationError ? "initialization error (fake)" : "fake CUDA error %d", e); return s; }
cudaError_t cudaGetLastError(void) { int e = last; last = 0; return e; }
cudaError_t cudaPeekAtLastError(void) { return last; }
static int nothing(void) OK
cudaError_t cudaGetDriverEntryPointByVersion(const char *s, void **f, unsigned v, unsigned long long g, enum cudaDriverEntryPointQueryResult *r) {
    static void *driver;
    if (!driver) driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    *f = driver ? dlsym(driver, s) : NULL;
    if (!*f) *f = (void *)nothing;
    if (r) *r = 0;
    return 0;
}
void **__cudaRegisterFatBinary(void *b) { static void *at[8]; return at; }
unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t m, void *s) OK
cudaError_t __cudaPopCallConfiguration(dim3 *g, dim3 *b, size_t *m, void *s) { *g = *b = (dim3){1, 1, 1}; *m = 0; *(void **)s = NULL; return 0; }
cudaError_t __cudaGetKernel(cudaKernel_t *k, const void *f) { *k = (cudaKernel_t)f; return 0; }
