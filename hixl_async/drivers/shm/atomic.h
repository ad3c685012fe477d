/* Shorthands for the __atomic builtins.  Dekker's pattern (store mine, then look at theirs) uses the _sc forms on both sides. */
#ifndef SHM_ATOMIC_H
#define SHM_ATOMIC_H

#define shm_load(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define shm_load_acq(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define shm_load_sc(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define shm_store(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define shm_store_rel(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define shm_store_sc(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
#define shm_swap_sc(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
#define shm_add(p, v) ((void)__atomic_fetch_add((p), (v), __ATOMIC_RELAXED))
#define shm_add_sc(p, v) __atomic_fetch_add((p), (v), __ATOMIC_SEQ_CST)
#define shm_sub_sc(p, v) __atomic_fetch_sub((p), (v), __ATOMIC_SEQ_CST)
/* A counter that only the loop writes needs no locked instruction. */
#define shm_bump(p, v) shm_store((p), shm_load(p) + (v))

#endif /* SHM_ATOMIC_H */
