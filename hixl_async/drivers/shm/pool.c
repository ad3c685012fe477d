#include "pool.h"

#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_NS = 50000 };              /* an idle thread looks for so long before it sleeps, where that paid the last time */

uint64_t shm_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- waking and sleeping --------------------------------------------------------------------------------------------- */

static void wake(shm_pool *pool, uint32_t most) {
    if (shm_load_sc(&pool->sleepers) == 0 || (most == 1 && shm_load_sc(&pool->looking) != 0)) return;
    shm_add_sc(&pool->epoch, 1u);
    syscall(SYS_futex, &pool->epoch, FUTEX_WAKE_PRIVATE, most, NULL, NULL, 0);
}

static int work_waits(shm_pool *pool) {
    return shm_load_sc(&pool->incoming) != NULL || shm_load_sc(&pool->ready) != 0 || shm_load_sc(&pool->purge) != 0
           || shm_load_sc(&pool->stopping) != 0;
}

/* Dekker: we say that we sleep, then look; the side that makes work stores it, then looks for sleepers.  A futex that wakes too
 * early, by a signal for example, does no harm. */
static void rest(shm_pool *pool, uint64_t due) {
    const uint32_t epoch = shm_load_sc(&pool->epoch);
    shm_add_sc(&pool->sleepers, 1u);
    if (!work_waits(pool)) {
        struct timespec left = {0, 0};
        const uint64_t now = due != 0 ? shm_now_ns() : 0;
        if (due > now) left = (struct timespec){(time_t)((due - now) / 1000000000u), (long)((due - now) % 1000000000u)};
        if (due == 0 || due > now)
            syscall(SYS_futex, &pool->epoch, FUTEX_WAIT_PRIVATE, epoch, due != 0 ? &left : NULL, NULL, 0);
    }
    shm_sub_sc(&pool->sleepers, 1u);
}

static void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Between ops that follow each other closely, sleeping costs both sides more than the copies: the loop a system call for
 * each, the thread its wake-up.  So a thread whose last wait was short looks before it sleeps; one at a time. */
void shm_pool_idle(shm_pool *pool, uint64_t due, uint64_t *waited) {
    const uint64_t since = shm_now_ns();
    if (due == 0 && *waited < LOOK_NS && pool->may_look && shm_swap_sc(&pool->looking, 1u) == 0) {
        do {
            for (int i = 0; i < 32 && !work_waits(pool); i++) pause_briefly();
            sched_yield();             /* the loop may have been put on our CPU */
        } while (!work_waits(pool) && shm_now_ns() - since < LOOK_NS);
        shm_store_sc(&pool->looking, 0u);
    }
    rest(pool, due);
    *waited = shm_now_ns() - since;
}

/* ---- the loop's side ------------------------------------------------------------------------------------------------- */

void shm_pool_push(shm_pool *pool, hxa_op *op) {
    shm_stack_push(&pool->incoming, op);
    wake(pool, 1);
}

void shm_pool_purge(shm_pool *pool) {
    shm_store_sc(&pool->purge, 1u);
    wake(pool, 1);
}

void shm_pool_call(shm_pool *pool) { wake(pool, 1); }

void shm_pool_look_again(shm_pool *pool) { wake(pool, INT_MAX); }

int shm_pool_open(shm_pool *pool, uint32_t limit) {
    pool->limit = limit;
    pool->may_look = sysconf(_SC_NPROCESSORS_ONLN) > 1;
    const int error = pthread_mutex_init(&pool->lock, NULL);
    return error == 0 ? 0 : HXA_REFUSAL(HXA_E_NOMEM, error);
}

void shm_pool_close(shm_pool *pool) {
    shm_store_sc(&pool->stopping, 1u);
    wake(pool, INT_MAX);
    for (uint32_t i = 0; i < pool->started; i++) pthread_join(pool->threads[i], NULL);
    pthread_mutex_destroy(&pool->lock);
}
