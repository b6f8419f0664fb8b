/* What a CTA of dispatch does: part of kernels.pml. */

inline publish_release() { TO_ALL(ended[me], FLAG(epoch, RELEASED)) }

inline put_rows() {
  d_step {
    assert(!SELF.wrong);
    for (slot : 0 .. SENT(me, epoch + 1) - 1) {
      if
      :: slot % grid == block ->
        PEER.RECEIVED(me, slot, epoch + 1) = epoch + 1;
        SELF.RECEIVED(me, slot, epoch + 1) = epoch + 1
      :: else
      fi
    }
    slot = 0
  }
}

inline publish_arrived() {
  TO_ALL(arrived[me * BLOCKS + block],
         FLAG(epoch + 1, PARTS(grid, (block + 1 == grid -> SENT(me, epoch + 1) + ASK_SENTINEL(me) : 0))))
}

inline judge_dispatch() {
  if
  :: half == FINISH && EPOCH_OF(own_arrived) != epoch + 1 -> refuse(NOT_STARTED)
#ifdef DISPATCH_LOOKS_IN_ONE_CTA
  :: half != FINISH && block == 0 && (PUBLISHED(epoch + 1, grid) || COMBINING) -> refuse(NOT_FINISHED)
#else
  :: half != FINISH && (PUBLISHED(epoch + 1, grid) || COMBINING) -> refuse(NOT_FINISHED)
#endif
  :: else
  fi
}

inline start_dispatch() {
  if
  :: open && block == 0 -> publish_release() /* R1 */
  :: else
  fi;
  if
  :: WAITS_AT_D1 -> observe_ended(epoch, true) /* D1 */
  :: else
  fi;
#ifdef MIXED
  if
  :: well && WAITS_AT_D0 ->
    if
    :: HAS_FINISHED(0, epoch) && HAS_FINISHED(1, epoch) /* D0 */
    OR_EXPIRES
    fi
  :: else
  fi;
#endif
  if
  :: well ->
#ifdef EARLY_D3
    publish_arrived();
    put_rows()
#else
    IN_ONE_STEP {
      put_rows();       /* D2 */
      publish_arrived() /* D3 */
    }
#endif
  :: else
  fi
}

#ifdef DEADLINES
#define CAN_EXPIRE true
#else
#define CAN_EXPIRE (SELF.fault || PEER.fault)
#endif

#ifdef D4_WITHOUT_OWN
#define D4_OVER (ALL_PARTS(arrived, 1 - me, epoch + 1) && EPOCH_OF(FIRST(arrived, me)) == epoch + 1)
#elif defined(SKIP_D4)
#define D4_OVER (PARTS_OF(FIRST(arrived, 0)) && PARTS_OF(FIRST(arrived, 1)))
#else
#define D4_OVER (ALL_PARTS(arrived, 0, epoch + 1) && ALL_PARTS(arrived, 1, epoch + 1))
#endif

inline finish_dispatch() {
#ifdef EARLY_EPOCH
  SELF.epoch = epoch + 1;
#endif
  if
  :: d_step { D4_OVER -> /* D4 */
      SELF.counts[0] = ROWS_OF(LAST(arrived, 0));
      SELF.counts[1] = ROWS_OF(LAST(arrived, 1));
#ifdef FORGET_ASK
      SELF.wanted = 0
#else
      SELF.wanted = (SELF.counts[0] > 0 -> ASK_OF(LAST(arrived, 0)) : 0) |
                    (SELF.counts[1] > 0 -> ASK_OF(LAST(arrived, 1)) * 2 : 0)
#endif
    }
    assert(HAVE_LOOKED(grid)) /* no CTA is still to look at the state */
  :: ANY_PART_AHEAD(arrived, epoch + 1) -> assert(false)
#if defined(DEADLINES) || defined(PEERS_MAY_STOP)
  :: d_step { CAN_EXPIRE -> SELF.counts[0] = 0; SELF.counts[1] = 0; SELF.wanted = 0; SELF.missed = true; well = !SELF.fault }
#endif
  fi;
  if
  :: well || !SELF.fault ->
    d_step { SELF.epoch = epoch + 1; SELF.open = true; SELF.fault = SELF.fault || SELF.missed };
    d_step { /* empty ids */
      for (slot : 0 .. ROWS - 1) {
        if
        :: slot >= SELF.counts[0] -> SELF.RECEIVED(0, slot, epoch + 1) = EMPTY
        :: else
        fi;
        if
        :: slot >= SELF.counts[1] -> SELF.RECEIVED(1, slot, epoch + 1) = EMPTY
        :: else
        fi
      }
      slot = 0
    }
  :: else
  fi
}

inline dispatch() {
  atomic {
    RUNS(DISPATCH) -> LOOK(arrived);
    if
    :: well -> judge_dispatch()
    :: else
    fi
  }
  if
  :: well && half != FINISH -> start_dispatch()
  :: else
  fi;
  if
  :: well && half != START && block == 0 -> finish_dispatch()
  :: else
  fi
}
