/* NCCL among processes of one machine whose "device memory" is memory of the host.

   A call returns at once, as NCCL's do. A thread of each communicator does the work in order, once all ranks are there,
   and the stream waits for it (cudart.c). A rank that never comes is waited for until the communicator is aborted. */
#define _GNU_SOURCE
#include <nccl.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#define MOST 64
#define NOTICE 120 /* seconds after which a waiting rank says so */
extern void *fakecuda_ask(cudaStream_t s) __attribute__((weak));
extern void fakecuda_begin(void *w) __attribute__((weak));
extern void fakecuda_end(void *w) __attribute__((weak));

typedef struct {
    volatile int arrived, round;
    volatile int pid[MOST];
    const void *volatile at[MOST];
    volatile long sent[MOST][MOST], taken[MOST][MOST];
} Meeting; /* what the ranks of a communicator share */
typedef struct Job {
    struct Job *next;
    enum { COLLECT, SWAP } kind;
    const void *from;
    void *to, *work;
    size_t n, start; /* numbers, and the first of them that is wanted */
    ncclDataType_t type;
    int op, root; /* -1: nothing is reduced, and all get all */
    int peer;
    volatile int *over;
    ncclResult_t *result;
} Job;
struct ncclComm {
    Meeting *m;
    int rank, size;
    volatile int aborted;
    char name[64];
    pthread_mutex_t lock;
    pthread_cond_t more;
    Job *first, *last;
};

static int width(ncclDataType_t t) { static const int w[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; return w[t]; }
static int meet(ncclComm_t c) { /* a barrier; 1 if it is aborted */
    int round = c->m->round;
    if (c->aborted) return 1;
    if (__sync_add_and_fetch(&c->m->arrived, 1) == c->size) { c->m->arrived = 0; __sync_synchronize(); c->m->round++; return 0; }
    time_t until = time(NULL) + NOTICE;
    for (long i = 0; c->m->round == round; i++) {
        if (c->aborted) return 1;
        if (i > 1000) usleep(200); else sched_yield();
        if (time(NULL) > until) { fprintf(stderr, "fake NCCL: rank %d of %d waits in %s\n", c->rank, c->size, c->name); until += NOTICE; }
    }
    return 0;
}
static void peek(ncclComm_t c, int rank, void *to, size_t from, size_t n) { /* read another rank's memory */
    char *at = (char *)c->m->at[rank] + from;
    if (c->m->pid[rank] == getpid()) { if (to != at) memmove(to, at, n); return; }
    for (size_t done = 0; done < n;) {
        struct iovec own = {(char *)to + done, n - done}, theirs = {at + done, n - done};
        ssize_t got = process_vm_readv(c->m->pid[rank], &own, 1, &theirs, 1, 0);
        if (got <= 0) { fprintf(stderr, "fake NCCL: cannot read rank %d: %s\n", rank, strerror(errno)); return; }
        done += got;
    }
}

static float scales[1024]; /* of the reductions that multiply first */
static int used_scales;
static float b2f(unsigned short b) { unsigned u = (unsigned)b << 16; float f; memcpy(&f, &u, 4); return f; }
static unsigned short f2b(float f) { unsigned u; memcpy(&u, &f, 4); return (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
static float h2f(unsigned short h) { _Float16 x; memcpy(&x, &h, 2); return x; }
static unsigned short f2h(float f) { _Float16 x = f; unsigned short h; memcpy(&h, &x, 2); return h; }
#define BY(a, b) (op == ncclMax ? (a > b ? a : b) : op == ncclMin ? (a < b ? a : b) : op == ncclProd ? a * b : a + b)
#define EACH(T) for (size_t i = 0; i < n; i++) { T a = ((T *)x)[i], b = ((T *)y)[i]; ((T *)x)[i] = BY(a, b); } break;
#define HALF(in, out) for (size_t i = 0; i < n; i++) { unsigned short *z = x; float a = in(z[i]), b = in(((unsigned short *)y)[i]); z[i] = out(BY(a, b)); } break;
static void reduce(void *x, void *y, size_t n, ncclDataType_t t, int op) {
    switch (t) {
    case ncclFloat32: EACH(float)
    case ncclFloat64: EACH(double)
    case ncclInt32: EACH(int)
    case ncclInt64: case ncclUint64: EACH(long)
    case ncclInt8: EACH(signed char)
    case ncclUint8: EACH(unsigned char)
    case ncclBfloat16: HALF(b2f, f2b)
    case ncclFloat16: HALF(h2f, f2h)
    default: fprintf(stderr, "fake NCCL: no reduction of type %d\n", t);
    }
}
static void multiply(void *x, size_t n, ncclDataType_t t, float by) {
    unsigned short *z = x;
    for (size_t i = 0; i < n; i++)
        switch (t) {
        case ncclFloat32: ((float *)x)[i] *= by; break;
        case ncclFloat64: ((double *)x)[i] *= by; break;
        case ncclBfloat16: z[i] = f2b(b2f(z[i]) * by); break;
        case ncclFloat16: z[i] = f2h(h2f(z[i]) * by); break;
        default: break;
        }
}
static ncclResult_t collect(ncclComm_t c, Job *j) {
    size_t w = width(j->type), n = j->n, bytes = n * w;
    char *made = NULL, *other = NULL;
    c->m->pid[c->rank] = getpid(); c->m->at[c->rank] = j->from;
    if (meet(c)) return ncclSystemError;
    if (j->op >= 0) {
        float by = j->op >= ncclNumOps ? scales[j->op - ncclNumOps] : 1;
        made = malloc(bytes + 1); other = malloc(bytes + 1);
        for (int i = 0; i < c->size; i++) {
            peek(c, i, i ? other : made, j->start * w, bytes);
            if (by != 1) multiply(i ? other : made, n, j->type, by);
            if (i) reduce(made, other, n, j->type, j->op);
        }
        if (j->op == ncclAvg) multiply(made, n, j->type, 1.f / c->size);
        free(other);
    } else if (j->root < 0) {
        made = malloc(c->size * bytes + 1);
        for (int i = 0; i < c->size; i++) peek(c, i, made + i * bytes, 0, bytes);
    } else if (j->root != c->rank) { made = malloc(bytes + 1); peek(c, j->root, made, 0, bytes); }
    if (meet(c)) { free(made); return ncclSystemError; }
    if (made && j->to) memcpy(j->to, made, (j->op < 0 && j->root < 0 ? c->size : 1) * bytes);
    else if (!made && j->to && j->to != j->from) memcpy(j->to, j->from, bytes);
    free(made);
    return 0;
}
/* Point to point: a file for each message. */
static ncclResult_t swap(ncclComm_t c, Job *j) {
    int from = j->from ? c->rank : j->peer, to = j->from ? j->peer : c->rank, f;
    char path[96], part[104];
    long number = __sync_fetch_and_add(j->from ? &c->m->sent[from][to] : &c->m->taken[from][to], 1);
    snprintf(path, sizeof path, "/dev/shm%s-%d-%d-%ld", c->name, from, to, number);
    snprintf(part, sizeof part, "%s.part", path);
    if (j->from) {
        f = open(part, O_CREAT | O_WRONLY, 0600);
        for (size_t d = 0; d < j->n;) d += write(f, (char *)j->from + d, j->n - d);
        close(f);
        rename(part, path);
        return 0;
    }
    while ((f = open(path, O_RDONLY)) < 0) { if (c->aborted) return ncclSystemError; usleep(200); }
    for (size_t d = 0; d < j->n;) { ssize_t got = read(f, (char *)j->to + d, j->n - d); if (got <= 0) break; d += got; }
    close(f);
    unlink(path);
    return 0;
}
static void *work(void *given) {
    ncclComm_t c = given;
    for (;;) {
        pthread_mutex_lock(&c->lock);
        while (!c->first) pthread_cond_wait(&c->more, &c->lock);
        Job *j = c->first;
        pthread_mutex_unlock(&c->lock);
        if (j->work) fakecuda_begin(j->work);
        ncclResult_t result = c->aborted ? ncclSystemError : j->kind == COLLECT ? collect(c, j) : swap(c, j);
        if (j->work) fakecuda_end(j->work);
        if (j->over) { *j->result = result; __sync_synchronize(); *j->over = 1; }
        pthread_mutex_lock(&c->lock);
        c->first = j->next;
        pthread_mutex_unlock(&c->lock);
        free(j);
    }
}
static ncclResult_t later(ncclComm_t c, cudaStream_t st, Job given) {
    Job *j = malloc(sizeof *j);
    *j = given;
    if (!j->over && fakecuda_ask) j->work = fakecuda_ask(st);
    pthread_mutex_lock(&c->lock);
    if (c->first) c->last->next = j; else c->first = j;
    c->last = j;
    pthread_cond_signal(&c->more);
    pthread_mutex_unlock(&c->lock);
    return 0;
}
#define ASK(...) later(c, st, (Job){.kind = COLLECT, .type = t, .n = n, .op = -1, .root = -1, .from = s, .to = r, __VA_ARGS__})
ncclResult_t ncclAllGather(const void *s, void *r, size_t n, ncclDataType_t t, ncclComm_t c, cudaStream_t st) { return ASK(); }
ncclResult_t ncclAllReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t st) { return ASK(.op = op); }
ncclResult_t ncclReduceScatter(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, ncclComm_t c, cudaStream_t st) { return ASK(.op = op, .start = c->rank * n); }
ncclResult_t ncclReduce(const void *s, void *r, size_t n, ncclDataType_t t, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t st) { return ASK(.op = op, .to = c->rank == root ? r : NULL); }
ncclResult_t ncclBroadcast(const void *s, void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) { return ASK(.root = root); }
ncclResult_t ncclBcast(void *r, size_t n, ncclDataType_t t, int root, ncclComm_t c, cudaStream_t st) { void *s = r; return ASK(.root = root); }
ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *by, ncclDataType_t t, ncclScalarResidence_t where, ncclComm_t c) {
    int i = __sync_fetch_and_add(&used_scales, 1) % 1024;
    scales[i] = t == ncclFloat64 ? *(double *)by : t == ncclFloat32 ? *(float *)by : t == ncclBfloat16 ? b2f(*(unsigned short *)by) : h2f(*(unsigned short *)by);
    *op = ncclNumOps + i;
    return 0;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(id, 0, sizeof *id);
    snprintf((char *)id, 60, "/fakenccl-%d-%ld-%d", getpid(), now.tv_nsec, rand());
    return 0;
}
static ncclResult_t make(ncclComm_t *c, int size, const char *name, int rank) {
    ncclComm_t made = *c = calloc(1, sizeof **c);
    int file = shm_open(name, O_RDWR | O_CREAT, 0600);
    pthread_t thread;
    if (file < 0 || ftruncate(file, sizeof(Meeting))) return ncclSystemError;
    made->m = mmap(NULL, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    made->rank = rank; made->size = size;
    snprintf(made->name, 64, "%s", name);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->more, NULL);
    if (meet(made)) return ncclSystemError;
    shm_unlink(name);
    return pthread_create(&thread, NULL, work, made) ? ncclSystemError : 0;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *c, int size, ncclUniqueId id, int rank, ncclConfig_t *g) { return make(c, size, (char *)&id, rank); }
ncclResult_t ncclCommInitRank(ncclComm_t *c, int size, ncclUniqueId id, int rank) { return make(c, size, (char *)&id, rank); }
ncclResult_t ncclCommInitRankScalable(ncclComm_t *c, int size, int rank, int n, ncclUniqueId *id, ncclConfig_t *g) { return make(c, size, (char *)id, rank); }
ncclResult_t ncclCommSplit(ncclComm_t c, int color, int key, ncclComm_t *out, ncclConfig_t *g) { /* in the order of key, then rank */
    struct { int color, key; ncclUniqueId id; } own = {color, key}, all[MOST];
    volatile int over = 0;
    ncclResult_t result;
    ncclGetUniqueId(&own.id);
    later(c, 0, (Job){.kind = COLLECT, .type = ncclInt8, .n = sizeof own, .op = -1, .root = -1, .from = &own, .to = all, .over = &over, .result = &result});
    while (!over) usleep(100);
    if (result) return result;
    *out = NULL;
    if (color < 0) return 0;
    int size = 0, rank = 0;
    const char *name = NULL;
    for (int i = 0; i < c->size; i++) if (all[i].color == color) {
        size++;
        if (all[i].key < key || (all[i].key == key && i < c->rank)) rank++;
        if (!name) name = (char *)&all[i].id;
    }
    return make(out, size, name, rank);
}
ncclResult_t ncclCommAbort(ncclComm_t c) { c->aborted = 1; return 0; }
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *e) { *e = 0; return 0; }
ncclResult_t ncclCommCount(const ncclComm_t c, int *n) { *n = c->size; return 0; }
ncclResult_t ncclCommUserRank(const ncclComm_t c, int *n) { *n = c->rank; return 0; }
ncclResult_t ncclGetVersion(int *v) { *v = 22907; return 0; }
const char *ncclGetErrorString(ncclResult_t r) { return "fake NCCL error"; }
const char *ncclGetLastError(ncclComm_t c) { return "fake NCCL"; }

/* In a group, messages are sent at its end, and received after that. */
static __thread int depth, waiting;
static __thread struct { ncclComm_t c; cudaStream_t st; Job job; } held[256];
static ncclResult_t send_all(void) {
    for (int sends = 1; sends >= 0; sends--)
        for (int i = 0; i < waiting; i++) if (!held[i].job.from == !sends) later(held[i].c, held[i].st, held[i].job);
    waiting = 0;
    return 0;
}
static ncclResult_t hold(ncclComm_t c, cudaStream_t st, Job job) {
    if (waiting == 256) return ncclInternalError;
    held[waiting].c = c; held[waiting].st = st; held[waiting++].job = job;
    return depth ? 0 : send_all();
}
ncclResult_t ncclGroupStart(void) { depth++; return 0; }
ncclResult_t ncclGroupEnd(void) { return --depth ? 0 : send_all(); }
ncclResult_t ncclSend(const void *b, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) { return hold(c, st, (Job){.kind = SWAP, .peer = peer, .from = b, .n = n * width(t)}); }
ncclResult_t ncclRecv(void *b, size_t n, ncclDataType_t t, int peer, ncclComm_t c, cudaStream_t st) { return hold(c, st, (Job){.kind = SWAP, .peer = peer, .to = b, .n = n * width(t)}); }
