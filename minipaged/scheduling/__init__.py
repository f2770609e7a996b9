"""Who runs next: requests, the step plan, the FCFS scheduler, batch policies, preemption. No torch."""
