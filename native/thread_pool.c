#include "thread_pool.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

struct batch {
    request_run *run;
    size_t num_requests, request_bytes;
    atomic_int holds; /* the submitter's and, while in flight, the pool's */
    pthread_mutex_t lock;
    pthread_cond_t ended;
    size_t num_remaining;
    int64_t start_ns, end_ns;
    bool failed;
    struct failure failure;
    alignas(max_align_t) unsigned char requests[];
};

struct entry {
    struct batch *batch;
    size_t index;
};

struct pool {
    pid_t process; /* threads do not survive a fork: a child must neither queue for them nor join them */
    pthread_mutex_t lock;
    pthread_cond_t not_empty, not_full, ended;
    size_t queue_depth_max, num_queued, first; /* a ring of queue_depth_max entries */
    size_t num_submitting;
    bool closing, joined;
    size_t num_threads;
    pthread_t *threads;
    struct entry queue[];
};

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void cond_init_monotonic(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* ---- batch ---- */

struct batch *batch_new(size_t num_requests, size_t request_bytes, request_run *run)
{
    return batch_new_sharing(num_requests, request_bytes, 0, run);
}

struct batch *batch_new_sharing(size_t num_requests, size_t request_bytes, size_t shared_bytes, request_run *run)
{
    size_t num_bytes;
    if (__builtin_mul_overflow(num_requests, request_bytes, &num_bytes) ||
        __builtin_add_overflow(num_bytes, shared_bytes, &num_bytes) ||
        __builtin_add_overflow(num_bytes, sizeof(struct batch), &num_bytes))
        return NULL;
    struct batch *batch = calloc(1, num_bytes);
    if (!batch)
        return NULL;
    batch->run = run;
    batch->num_requests = batch->num_remaining = num_requests;
    batch->request_bytes = request_bytes;
    atomic_init(&batch->holds, 1);
    pthread_mutex_init(&batch->lock, NULL);
    cond_init_monotonic(&batch->ended);
    return batch;
}

void *batch_request(struct batch *batch, size_t index) { return batch->requests + index * batch->request_bytes; }

void *batch_shared(struct batch *batch) { return batch_request(batch, batch->num_requests); }

void batch_release(struct batch *batch)
{
    if (atomic_fetch_sub(&batch->holds, 1) > 1)
        return;
    pthread_cond_destroy(&batch->ended);
    pthread_mutex_destroy(&batch->lock);
    free(batch);
}

bool batch_wait(struct batch *batch, int64_t timeout_ns)
{
    int64_t deadline_ns = timeout_ns < 0 ? 0 : monotonic_ns() + timeout_ns;
    struct timespec deadline = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    int code = 0;
    pthread_mutex_lock(&batch->lock);
    while (batch->num_remaining && code != ETIMEDOUT)
        code = timeout_ns < 0 ? pthread_cond_wait(&batch->ended, &batch->lock)
                              : pthread_cond_timedwait(&batch->ended, &batch->lock, &deadline);
    bool done = !batch->num_remaining;
    pthread_mutex_unlock(&batch->lock);
    return done;
}

void batch_end(struct batch *batch)
{
    pthread_mutex_lock(&batch->lock);
    batch->num_remaining = 0;
    pthread_cond_broadcast(&batch->ended);
    pthread_mutex_unlock(&batch->lock);
}

void batch_span(struct batch *batch, int64_t *start_ns, int64_t *end_ns)
{
    pthread_mutex_lock(&batch->lock);
    *start_ns = batch->start_ns;
    *end_ns = batch->end_ns;
    pthread_mutex_unlock(&batch->lock);
}

bool batch_failure(struct batch *batch, struct failure *failure)
{
    pthread_mutex_lock(&batch->lock);
    bool failed = batch->failed;
    *failure = batch->failure;
    pthread_mutex_unlock(&batch->lock);
    return failed;
}

/* After a failure the rest of the batch is skipped: its bytes are unspecified anyway, and a full or broken drive is
 * best left alone. */
static void batch_work(struct batch *batch, size_t index)
{
    pthread_mutex_lock(&batch->lock);
    if (!batch->start_ns)
        batch->start_ns = monotonic_ns();
    bool skip = batch->failed;
    pthread_mutex_unlock(&batch->lock);

    struct failure failure = {0};
    bool failed = !skip && !batch->run(batch_request(batch, index), &failure);

    pthread_mutex_lock(&batch->lock);
    if (failed && !batch->failed) {
        batch->failed = true;
        batch->failure = failure;
    }
    batch->end_ns = monotonic_ns();
    bool last = --batch->num_remaining == 0;
    if (last)
        pthread_cond_broadcast(&batch->ended);
    pthread_mutex_unlock(&batch->lock);
    if (last)
        batch_release(batch);
}

/* ---- pool ---- */

static void *pool_thread(void *argument)
{
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->num_queued && !(pool->closing && !pool->num_submitting))
            pthread_cond_wait(&pool->not_empty, &pool->lock);
        if (!pool->num_queued)
            break;
        struct entry entry = pool->queue[pool->first];
        pool->first = (pool->first + 1) % pool->queue_depth_max;
        pool->num_queued--;
        pthread_cond_signal(&pool->not_full);
        pthread_mutex_unlock(&pool->lock);
        batch_work(entry.batch, entry.index);
        pthread_mutex_lock(&pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Signals go to the interpreter's threads; only faults of our own making stay with the worker. */
static int pool_start(struct pool *pool, size_t num_threads)
{
    sigset_t blocked, saved;
    sigfillset(&blocked);
    sigdelset(&blocked, SIGSEGV);
    sigdelset(&blocked, SIGBUS);
    sigdelset(&blocked, SIGFPE);
    sigdelset(&blocked, SIGILL);
    pthread_sigmask(SIG_SETMASK, &blocked, &saved);
    int code = 0;
    while (!code && pool->num_threads < num_threads) {
        code = pthread_create(&pool->threads[pool->num_threads], NULL, pool_thread, pool);
        pool->num_threads += !code;
    }
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
    return code;
}

struct pool *pool_new(size_t num_threads, size_t queue_depth_max)
{
    struct pool *pool = calloc(1, sizeof(struct pool) + queue_depth_max * sizeof(struct entry));
    pthread_t *threads = calloc(num_threads, sizeof(pthread_t));
    if (!pool || !threads) {
        free(pool);
        free(threads);
        errno = ENOMEM;
        return NULL;
    }
    pool->process = getpid();
    pool->queue_depth_max = queue_depth_max;
    pool->threads = threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->not_empty, NULL);
    pthread_cond_init(&pool->not_full, NULL);
    pthread_cond_init(&pool->ended, NULL);
    int code = pool_start(pool, num_threads);
    if (code) {
        pool_free(pool);
        errno = code;
        return NULL;
    }
    return pool;
}

size_t pool_num_threads(const struct pool *pool) { return pool->num_threads; }

int pool_submit(struct pool *pool, struct batch *batch)
{
    if (pool->process != getpid())
        return ECHILD;
    pthread_mutex_lock(&pool->lock);
    if (pool->closing) {
        pthread_mutex_unlock(&pool->lock);
        return EPIPE;
    }
    if (batch->num_requests)
        atomic_fetch_add(&batch->holds, 1);
    else
        batch->start_ns = batch->end_ns = monotonic_ns();
    pool->num_submitting++;
    for (size_t index = 0; index < batch->num_requests; index++) {
        while (pool->num_queued == pool->queue_depth_max)
            pthread_cond_wait(&pool->not_full, &pool->lock);
        size_t last = (pool->first + pool->num_queued++) % pool->queue_depth_max;
        pool->queue[last] = (struct entry){batch, index};
        pthread_cond_signal(&pool->not_empty);
    }
    pool->num_submitting--;
    if (pool->closing)
        pthread_cond_broadcast(&pool->not_empty);
    pthread_mutex_unlock(&pool->lock);
    return 0;
}

void pool_close(struct pool *pool)
{
    if (pool->process != getpid())
        return;
    pthread_mutex_lock(&pool->lock);
    bool first = !pool->closing;
    pool->closing = true;
    pthread_cond_broadcast(&pool->not_empty);
    while (!first && !pool->joined)
        pthread_cond_wait(&pool->ended, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    if (!first)
        return;
    for (size_t i = 0; i < pool->num_threads; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_mutex_lock(&pool->lock);
    pool->joined = true;
    pthread_cond_broadcast(&pool->ended);
    pthread_mutex_unlock(&pool->lock);
}

void pool_free(struct pool *pool)
{
    pool_close(pool);
    if (pool->process != getpid())
        return; /* a mutex may have been held at the fork; the child's copy is left alone */
    pthread_cond_destroy(&pool->ended);
    pthread_cond_destroy(&pool->not_full);
    pthread_cond_destroy(&pool->not_empty);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
    free(pool);
}
