/* Sending notifications.
 *
 * The loop and the copy threads all append to the peer's ring, and none may wait for another.  `busy` counts those that want
 * to: the one that made it 1 holds the ring and works until no other came meanwhile; the others leave their op on the stack and
 * go.  Ops whose notification finds the ring full wait in `waiting`, in order, and the peer rings our bell when it has read.
 */
#ifndef SHM_NOTES_H
#define SHM_NOTES_H

#include "link.h"

/* The loop, for a batch that lacks only its notification: DONE if the notification was sent, else the op waits. */
SHM_INTERNAL int shm_notes_send(hxa_link *link, const hxa_batch *batch, hxa_op *op);

/* An accepted op whose data has landed: its notification is next. */
SHM_INTERNAL void shm_notes_queue(hxa_link *link, hxa_op *op);

/* Any thread: send what can be sent, or leave it to the thread that is just doing that. */
SHM_INTERNAL void shm_notes_pump(hxa_link *link);

/* The loop, after arming: return 1 if a pump would send something. */
SHM_INTERNAL int shm_notes_ready(hxa_link *link);

#endif /* SHM_NOTES_H */
