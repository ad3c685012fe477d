/* A signal that the program handles interrupts system calls of the thread that it is delivered to; that is no failure. */
#ifndef HXA_RETRY_H
#define HXA_RETRY_H

#include <errno.h>

/* The answer of a system call that answers a negative number and EINTR when it was interrupted, and is then called again.
 * Not for close, which must not be repeated: the descriptor is gone, and its number may be in use again. */
#define HXA_RETRY(call)                                      \
    (__extension__({                                         \
        __typeof__(call) hxa_answer_;                        \
        do hxa_answer_ = (call);                             \
        while (hxa_answer_ < 0 && errno == EINTR);           \
        hxa_answer_;                                         \
    }))

#endif /* HXA_RETRY_H */
