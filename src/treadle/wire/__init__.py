"""What crosses a process border: typed messages and their JSON form. No process logic lives here."""
