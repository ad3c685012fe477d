/* A signal that the program handles interrupts system calls of the thread that it is delivered to; that is not a failure. */
#ifndef HXA_RETRY_H
#define HXA_RETRY_H

#include <errno.h>

/* Repeat a system call that returns a negative number with EINTR while it is interrupted.  Not for close, which must not be
 * repeated, because the descriptor is closed and its number may be in use again. */
#define HXA_RETRY(call)                                      \
    (__extension__({                                         \
        __typeof__(call) hxa_answer_;                        \
        do hxa_answer_ = (call);                             \
        while (hxa_answer_ < 0 && errno == EINTR);           \
        hxa_answer_;                                         \
    }))

#endif /* HXA_RETRY_H */
